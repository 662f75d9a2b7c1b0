// Ctrl-C during a wait. The interpreter's handler only records the signal and raises when the main thread returns to
// Python, which may take long if it waits for a peer. In an InterruptScope the handler is chained: it wakes a thread,
// and if the same scope is still open half a second later, that thread aborts the communicator.
#include <semaphore.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <mutex>
#include <thread>

#include <pybind11/gil_safe_call_once.h>

#include "binding.h"

namespace libzero {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);

struct Watch {
  std::mutex mutex;
  std::weak_ptr<zero::Communicator> comm;  // guarded; of the open scope
  std::atomic<std::uint64_t> scope{0};     // number of the open scope; 0: none
  std::uint64_t scopes = 0;                // main thread only
  int depth = 0;                           // main thread only
  pid_t process = 0;                       // the process that started the thread
  struct sigaction chained = {};           // the previous handler
  sem_t signalled;
};

Watch& watch() {
  static auto* const instance = new Watch;  // its thread may outlive main()
  return *instance;
}

void on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  sem_post(&watch().signalled);
  const auto& next = watch().chained;
  if ((next.sa_flags & SA_SIGINFO) != 0) {
    next.sa_sigaction(number, info, context);
  } else {
    next.sa_handler(number);
  }
  errno = saved;
}

void watch_signals() {
  auto& state = watch();
  while (true) {
    while (sem_wait(&state.signalled) != 0) {
    }
    const auto scope = state.scope.load();
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (scope != 0 && state.scope.load() == scope && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (scope == 0 || state.scope.load() != scope) continue;
    std::shared_ptr<zero::Communicator> comm;
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      if (state.scope.load() == scope) comm = state.comm.lock();
    }
    if (comm) comm->abort("KeyboardInterrupt");
  }
}

bool on_main_thread() {
  // Not a plain static: the import may release the GIL, and a thread with the GIL would then wait for the static.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<unsigned long> ident;
  ident.call_once_and_store_result(
      [] { return py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>(); });
  return static_cast<unsigned long>(::pthread_self()) == ident.get_stored();
}

// False if the program installed its own SIGINT handler.
bool interrupts() {
  const auto signal = py::module_::import("signal");
  return signal.attr("getsignal")(SIGINT).is(signal.attr("default_int_handler"));
}

void start_thread() {
  auto& state = watch();
  if (state.process == ::getpid()) return;
  sem_init(&state.signalled, 0, 0);
  state.process = ::getpid();
  std::thread(watch_signals).detach();
}

}  // namespace

InterruptScope::InterruptScope(const std::shared_ptr<zero::Communicator>& comm) {
  if (comm == nullptr || comm->size() == 1 || !on_main_thread()) return;
  auto& state = watch();
  if (state.depth == 0 && !interrupts()) return;
  armed_ = true;
  if (state.depth++ > 0) return;
  start_thread();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.comm = comm;
    state.scope = ++state.scopes;
  }
  struct sigaction ours = {};
  sigaction(SIGINT, nullptr, &state.chained);
  ours.sa_sigaction = on_signal;
  ours.sa_mask = state.chained.sa_mask;
  ours.sa_flags = state.chained.sa_flags | SA_SIGINFO;
  sigaction(SIGINT, &ours, nullptr);
}

InterruptScope::~InterruptScope() {
  if (!armed_) return;
  auto& state = watch();
  if (--state.depth > 0) return;
  struct sigaction now = {};
  sigaction(SIGINT, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_signal) sigaction(SIGINT, &state.chained, nullptr);
  std::lock_guard<std::mutex> lock(state.mutex);
  state.scope = 0;
  state.comm.reset();
}

}  // namespace libzero
