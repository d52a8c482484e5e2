// What the files of the runtime's stub share.
#ifndef BATCHFINDER_CUDART_H
#define BATCHFINDER_CUDART_H
#include "stub.h"
int failed(int error);       // remembers it for cudaGetLastError, and returns it
int context_error(void);     // what a dead context answers to everything; 0 while it lives
void streams_synchronize_all(void);
int cudaStreamSynchronize(void *stream);
void streams_count_launch(void *stream);
#endif
