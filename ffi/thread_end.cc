#include "thread_end.h"

#include <pthread.h>
#include <unistd.h>

namespace jax_fp8gemm {
namespace {

void SleepForever(void*) {
  for (;;) pause();
}

}  // namespace

// NOTE: this file is compiled with -fno-exceptions. glibc then enters the handler by a jump. With
// exceptions it would unwind this frame like those of C++, which aborts where the unwinder of the
// extension is not the one of glibc (libc++ and libunwind, linked statically).
void SleepIfThreadEnds(void (*call)(void*), void* argument) {
  pthread_cleanup_push(SleepForever, nullptr);
  call(argument);
  pthread_cleanup_pop(0);
}

}  // namespace jax_fp8gemm
