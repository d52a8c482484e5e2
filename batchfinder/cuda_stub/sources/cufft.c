// cuFFT: how large a plan's work area is, which it says on a GPU alone: as much as the transform for one of several dimensions, none for
// those of one (batchfinder/recording/operands.py has the sources).
#include "stub.h"

int cufftCreate(int *plan) {
    static int plans;
    *plan = __sync_add_and_fetch(&plans, 1);
    return SUCCESS;
}
int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in_embed, long long in_stride, long long in_distance, int in_type, long long *out_embed,
                        long long out_stride, long long out_distance, int out_type, long long batch, size_t *work_bytes, int execution_type) {
    (void)plan, (void)in_embed, (void)in_stride, (void)in_distance, (void)out_embed, (void)out_stride, (void)out_distance, (void)execution_type;
    // cudaDataType: 0, 1 and 2 are real (32, 64 and 16 bits), 4, 5 and 6 complex.
    int is_real = in_type < 4 || out_type < 4, kind = (in_type < 4 ? in_type : in_type - 4);
    u64 number = kind == 1 ? 16 : kind == 2 ? 4 : 8, elements = batch;
    for (int i = 0; i < rank; i++) elements *= i == rank - 1 && is_real ? n[i] / 2 + 1 : n[i];
    *work_bytes = rank > 1 ? elements * number : 0;
    stub_assumed("cuFFT's work areas: as large as a transform of several dimensions, nothing for those of one");
    return SUCCESS;
}
