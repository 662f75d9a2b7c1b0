// Handlers use write and _exit only.
#include "apps/finetune/train_signals.h"

#include <signal.h>
#include <unistd.h>

namespace zero::cli {
namespace {

volatile sig_atomic_t stop_signal = 0;
volatile sig_atomic_t wipes = 0;
struct sigaction before[3];
constexpr int kSignals[3] = {SIGTERM, SIGUSR1, SIGINT};

void on_signal(int number) {
  if (number != SIGINT && stop_signal == 0) {
    stop_signal = number;
    return;
  }
  if (number == SIGUSR1) return;  // a repeated request must not cancel the save
  constexpr char kWipe[] = "\r\033[K";
  if (wipes && ::write(2, kWipe, sizeof kWipe - 1) < 0) _exit(1);
  _exit(128 + number);
}

}  // namespace

StopSignals::StopSignals(bool wipe_line) {
  stop_signal = 0;
  wipes = wipe_line;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (int i = 0; i < 3; ++i) ::sigaction(kSignals[i], &action, &before[i]);
}

StopSignals::~StopSignals() {
  for (int i = 0; i < 3; ++i) ::sigaction(kSignals[i], &before[i], nullptr);
}

int StopSignals::requested() { return stop_signal; }

}  // namespace zero::cli
