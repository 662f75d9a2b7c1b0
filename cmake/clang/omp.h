// In place of the compiler's <omp.h>, for compilers other than GCC. libtorch has the OpenMP run time of GCC in the
// process. clang makes calls of LLVM's from `#pragma omp`, and two run times in one process start twice as many
// threads. So clang compiles without OpenMP, and what libzero divides among threads calls the run time that is there.
#pragma once

extern "C" {
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
int omp_in_parallel();
void omp_set_num_threads(int threads);
}
