// In place of torch's header of this name (omp.h says why): what at::parallel_for and at::parallel_reduce call.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#define INTRA_OP_PARALLEL

// What GCC makes of `#pragma omp parallel`; 0 threads: as many as omp_set_num_threads() says.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);

namespace at::internal {

template <class F>
void invoke_parallel(std::int64_t begin, std::int64_t end, std::int64_t grain, const F& f) {
  struct Team {
    std::int64_t begin, end, grain;
    const F& f;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error;
  } team{begin, end, grain, f};
  const auto member = [](void* data) {
    auto& t = *static_cast<Team*>(data);
    std::int64_t threads = omp_get_num_threads();
    if (t.grain > 0) threads = std::min(threads, divup(t.end - t.begin, t.grain));
    const std::int64_t me = omp_get_thread_num(), part = divup(t.end - t.begin, threads), from = t.begin + me * part;
    if (from >= t.end) return;
    try {
      const ThreadIdGuard guard(static_cast<int>(me));
      t.f(from, std::min(t.end, from + part));
    } catch (...) {
      if (!t.failed.test_and_set()) t.error = std::current_exception();
    }
  };
  GOMP_parallel(member, &team, 0, 0);
  if (team.error) std::rethrow_exception(team.error);
}

}  // namespace at::internal
