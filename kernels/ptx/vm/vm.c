/* One translation unit. The C library is that of the process which loads this. */
#include "machine.h"

void *malloc(u64), *calloc(u64, u64), *realloc(void *, u64), *aligned_alloc(u64, u64);
void free(void *);
void *memcpy(void *restrict, const void *restrict, u64), *memset(void *, int, u64);
double exp2(double), log2(double), ldexp(double, int);

#include "clocks.c"
#include "memory.c"
#include "alu.c"
#include "sync.c"
#include "async.c"
#include "tensor.c"
#include "tcgen05.c"
#include "access.c"
#include "landing.c"
#include "interpreter.c"
#include "schedule.c"
