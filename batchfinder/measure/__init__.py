"""Run it on a real device: recognise out of memory, clear up, and leave no trace."""
