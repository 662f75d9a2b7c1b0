// See background.h.
#include "checkpoint/background.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/executor.h"
#include "base/log.h"
#include "checkpoint/snapshot.h"
#include "engine/rank_agreement.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kSaving = "save_checkpoint";
// Failed saves in a row that libzero.save_errors "warn" logs; the next one is thrown.
constexpr int kMostWarnings = 2;

struct Cancelled : std::exception {};

class Background final : public engine::BackgroundSave {
 public:
  Background(engine::State& state, std::unique_ptr<Save> save)
      : state_(state), save_(std::move(save)), snapshot_(state, save_->pieces(), state.job.settings.checkpoint.memory) {
    start_writer();
    snapshot_.watch();  // last, because nothing may fail after it
  }

  ~Background() override {
    cancelled_ = true;
    work_.wait();
    snapshot_.stop_watching();
    observe::status_page().set_save("", 0, 0);
    if (!over_)
      base::log(LogLevel::Warning, "[save_checkpoint] the save of " + save_->tag() +
                                       " was not finished and is lost; the checkpoint before stands. Hint: call "
                                       "finish_checkpoint() before the Engine ends.");
  }

  bool at_boundary() override {
    const auto mine = status();
    const auto all = state_.job.comm->size() > 1 ? state_.job.comm->all_gather_bytes(mine) : std::vector{mine};
    const auto has = [&](const char* what) { return std::find(all.begin(), all.end(), what) != all.end(); };
    if (has(kFailed))
      cancelled_ = true;  // the other ranks stop, too
    else if (has(kBehind))
      wait_while_moving(
          kSaving, [this] { snapshot_.wait_for_room([this](std::int64_t missing) { return !is_behind(missing); }); });
    if (!cancelled_ && (has(kBehind) || has(kBusy))) return false;
    finish();
    return true;
  }

  void release(const char* call) override {
    wait_while_moving(call, [this] { snapshot_.release(); });
  }
  void release_here() override { snapshot_.release(); }

  // [collective] Waits for the writers of all ranks, and publishes.
  void finish() {
    over_ = true;
    auto& progress = state_.parts.progress;
    try {
      const auto reports = engine::agree_while_moving(*state_.job.comm, kSaving, moved_, [&] {
        try {
          work_.get();
        } catch (const Cancelled&) {
          // Another rank has the cause.
        }
        return report_;
      });
      if (cancelled_) throw IoError("[save_checkpoint] the save of " + save_->tag() + " was given up");
      snapshot_.stop_watching();
      save_->publish(reports);
    } catch (const IoError& e) {
      snapshot_.stop_watching();
      if (!state_.job.settings.checkpoint.save_errors_warn || progress.failed_saves == kMostWarnings) throw;
      ++progress.failed_saves;
      if (state_.job.comm->rank() == 0)
        base::log(LogLevel::Warning, base::join("[save_checkpoint] the save of ", save_->tag(), " failed, ",
                                                progress.failed_saves, " in a row (libzero.save_errors): ", e.what()));
      return;
    }
    progress.failed_saves = 0;
    progress.saved_tag = save_->tag();
    if (state_.job.settings.checkpoint.show_statistics) tell();
  }

 private:
  static constexpr const char* kBusy = "busy";
  static constexpr const char* kBehind = "behind";
  static constexpr const char* kFailed = "failed";
  using Clock = std::chrono::steady_clock;
  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  // Whether an update that begins now would wait for the writer so long that other ranks, which wait for the update in
  // a collective, come near their limit. missing: bytes that the writer must copy first.
  bool is_behind(std::int64_t missing) const {
    const auto limit = std::chrono::duration<double>(state_.job.comm->timeout()).count() / 4;
    return static_cast<double>(missing) * since(begun_) > static_cast<double>(moved_.load()) * limit;
  }

  // [collective] Ranks tell each other meanwhile that bytes move.
  void wait_while_moving(const char* call, const std::function<void()>& wait) {
    (void)engine::agree_while_moving(*state_.job.comm, call, moved_, [&] {
      wait();
      return "";
    });
  }

  std::string status() const {
    if (!base::is_ready(work_)) return is_behind(snapshot_.missing_room()) ? kBehind : kBusy;
    try {
      work_.get();
      return "done";
    } catch (const std::exception&) {
      return kFailed;
    }
  }

  void start_writer() {
    work_ = writer_.add(
        [this] {
          const at::NoGradGuard no_grad;
          const formats::MovesFor save_files(moved_);
          const auto end = [this](void*) { snapshot_.end(); };
          const std::unique_ptr<void, decltype(end)> at_end(this, end);
          report_ = save_->write([this](std::size_t piece, std::int64_t at, std::int64_t numel) {
            if (cancelled_) throw Cancelled();
            show();
            return snapshot_.read(piece, at, numel);
          });
          show();
          seconds_ = since(begun_);
        },
        1);
  }

  // Files have headers as well.
  void show() const {
    observe::status_page().set_save(save_->tag(), std::min(moved_.load(), save_->bytes()), save_->bytes());
  }

  void tell() const {
    const auto stats = snapshot_.stats();
    base::log(LogLevel::Info,
              base::join("checkpoint ", save_->tag(), ": rank ", state_.job.comm->rank(), " wrote ", moved_.load(),
                         " bytes in ", seconds_, " s in the background; updates waited ", stats.stalled,
                         " s and copied ", stats.held, " bytes, ", stats.most_held, " at once"));
  }

  engine::State& state_;
  std::unique_ptr<Save> save_;
  Snapshot snapshot_;
  const Clock::time_point begun_ = Clock::now();
  double seconds_ = 0;
  std::atomic<bool> cancelled_{false};
  std::atomic<std::uint64_t> moved_{0};
  bool over_ = false;
  std::string report_;
  base::Executor writer_;
  std::shared_future<void> work_;
};

}  // namespace

void write_in_background(engine::State& state, std::unique_ptr<Save> save) {
  // All ranks have one or none, because steps ask for it together.
  try {
    (void)engine::agree(*state.job.comm, kSaving, [&] {
      state.parts.progress.background = std::make_unique<Background>(state, std::move(save));
      return "";
    });
  } catch (...) {
    state.parts.progress.background.reset();
    throw;
  }
}

std::string finish_save(engine::State& state) {
  if (state.parts.progress.background) {
    const at::NoGradGuard no_grad;
    const auto save = std::move(state.parts.progress.background);
    static_cast<Background&>(*save).finish();
  }
  return state.parts.progress.saved_tag;
}

}  // namespace zero::checkpoint
