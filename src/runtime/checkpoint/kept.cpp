// See kept.h. One slot is filled while the other has the newest snapshot that all ranks have completed.
#include "checkpoint/kept.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <tuple>

#include "base/check.h"
#include "base/executor.h"
#include "base/log.h"
#include "checkpoint/save.h"
#include "checkpoint/snapshot.h"
#include "engine/rank_agreement.h"
#include "formats/hash.h"
#include "formats/rank_report.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kKeeping = "keep_snapshot";

// All that must be equal for a rank to restore the snapshot of an earlier attempt.
std::string key_of(engine::State& state, const base::KeptMemory& memory, const std::string& root,
                   const std::vector<engine::StatePiece>& pieces) {
  const auto& mesh = *state.parts.ranks.mesh;
  auto folder = std::filesystem::absolute(root).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();  // it ended with a slash
  auto text =
      base::join("zero.kept/1\n", memory.run, "\n", folder.string(), "\n", state.job.options.digest(), "\n",
                 state.job.comm->rank(), " ", state.job.comm->size(), " ", mesh.size("sp"), " ", mesh.size("tp"), "\n");
  for (const auto& piece : pieces)
    text += base::join(piece.kind, " ", piece.name, " ", c10::toString(piece.dtype), " ", piece.begin, " ", piece.numel,
                       "\n");
  return formats::hash_of(text);
}

// Two Engines would overwrite each other's.
class Claim {
 public:
  explicit Claim(int fd) : fd_(fd) {
    const std::lock_guard lock(mutex());
    if (!claimed().insert(fd).second)
      throw ConfigError(
          "[keep_snapshot] another Engine of this process keeps snapshots, expected one. Hint: "
          "libzero.keep_snapshot_every 0 for the others, which restarts load from their checkpoints.");
  }
  ~Claim() {
    const std::lock_guard lock(mutex());
    claimed().erase(fd_);
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::set<int>& claimed() {
    static std::set<int> fds;
    return fds;
  }
  const int fd_;
};

// A snapshot that is being written.
class Fill {
 public:
  Fill(engine::State& state, formats::FsOps& fs, const base::KeptMemory& memory, const std::string& root, int slot)
      : state_(state), number_(slot), pieces_(state.exports.pieces_to_keep()), slot_(fs, memory.fd, slot) {
    manifest_ = manifest_of(state);
    manifest_.tag = "kept";
    manifest_.id = key_of(state, memory, root, pieces_);
    pieces_.push_back(generator_piece(state));
    snapshot_.emplace(state, pieces_, state.job.settings.checkpoint.memory);
    header_ = {memory.attempt, manifest_.global_steps, manifest_.id, ""};
    work_ = writer_.add(
        [this] {
          const at::NoGradGuard no_grad;
          const formats::MovesFor fill(moved_);
          const auto end = [this](void*) { snapshot_->end(); };
          const std::unique_ptr<void, decltype(end)> at_end(this, end);
          write();
        },
        1);
    snapshot_->watch();  // last, because nothing may fail after it
  }
  // Completes it: after the death of another rank it may be the newest that all have.
  ~Fill() {
    work_.wait();
    snapshot_->stop_watching();
  }
  Fill(const Fill&) = delete;
  Fill& operator=(const Fill&) = delete;

  int slot() const { return number_; }
  std::int64_t step() const { return header_.step; }
  void release() { snapshot_->release(); }
  const std::atomic<std::uint64_t>& moved() const { return moved_; }
  // Waits for the end; "" or what failed.
  std::string fault() {
    try {
      work_.get();
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  }

 private:
  void write() {
    const auto read = [this](std::size_t piece, std::int64_t at, std::int64_t numel) {
      return snapshot_->read(piece, at, numel);
    };
    std::vector<formats::Source> states, own;
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      const bool is_private = pieces_[p].kind == kBuffer || pieces_[p].kind == kPrivate;
      (is_private ? own : states).push_back(source_from(pieces_[p], p, read));
    }
    const auto num_states = states.size();
    states.insert(states.end(), own.begin(), own.end());
    slot_.begin();
    const auto folder = slot_.folder();
    const auto rank = static_cast<std::size_t>(state_.job.comm->rank());
    formats::RankReport report;
    report.add(formats::write_rank_file(folder, formats::rank_file_name(static_cast<int>(rank)), states), num_states);
    formats::ManifestMerge merge(manifest_);
    merge.add(std::move(report));
    merge.finish(folder);
    manifest_.ranks.resize(static_cast<std::size_t>(manifest_.world));
    std::swap(manifest_.ranks[0], manifest_.ranks[rank]);
    const auto text = formats::manifest_text(manifest_);
    folder.write_file(formats::kManifestName, text);
    header_.manifest_hash = formats::hash_of(text);
    slot_.publish(header_);
  }

  engine::State& state_;
  const int number_;
  std::vector<engine::StatePiece> pieces_;
  formats::KeptSlot slot_;
  formats::Manifest manifest_;
  formats::KeptHeader header_;
  std::optional<Snapshot> snapshot_;
  std::atomic<std::uint64_t> moved_{0};
  base::Executor writer_;
  std::shared_future<void> work_;
};

class Kept final : public engine::KeptSave {
 public:
  Kept(engine::State& state, const base::KeptMemory& memory) : state_(state), memory_(memory), claim_(memory.fd) {}

  void release() override {
    if (fill_) fill_->release();
  }

  // [collective] Completes the one before, and begins another.
  void keep(formats::FsOps& fs, const std::string& root) {
    complete();
    state_.stepper.flush();
    try {
      (void)engine::agree(*state_.job.comm, kKeeping, [&] {
        // Not over the newest snapshot that all ranks have.
        const int slot = state_.parts.progress.kept_slot == 0 ? 1 : 0;
        fill_ = std::make_unique<Fill>(state_, fs, memory_, root, slot);
        return "";
      });
    } catch (...) {
      fill_.reset();  // all ranks have one, or none
      throw;
    }
  }

 private:
  // A snapshot that failed does not end a run: the one before stands.
  void complete() {
    if (!fill_) return;
    const auto faults =
        engine::agree_while_moving(*state_.job.comm, kKeeping, fill_->moved(), [&] { return fill_->fault(); });
    const auto fill = std::move(fill_);
    const auto failed = std::find_if(faults.begin(), faults.end(), [](const auto& text) { return !text.empty(); });
    if (failed == faults.end()) {
      state_.parts.progress.kept_slot = fill->slot();
      observe::status_page().note_commit();
    } else if (state_.job.comm->rank() == 0) {
      base::log(LogLevel::Warning,
                base::join("[keep_snapshot] the snapshot of step ", fill->step(),
                           " is lost, the one before stands: rank ", failed - faults.begin(), ": ", *failed));
    }
  }

  engine::State& state_;
  const base::KeptMemory memory_;
  const Claim claim_;
  std::unique_ptr<Fill> fill_;
};

}  // namespace

void keep_snapshot(engine::State& state, formats::FsOps& fs, const base::KeptMemory& memory, const std::string& root) {
  auto& parts = state.parts;
  const auto every = parts.job.settings.checkpoint.keep_every, steps = parts.program->steps();
  const auto& accumulated = parts.accumulated();
  const bool within_a_step = accumulated.micro_batches > 0 || accumulated.open;
  if (every == 0 || steps == 0 || steps % every != 0 || within_a_step) return;
  const at::NoGradGuard no_grad;
  auto& kept = parts.progress.kept;
  // All ranks keep something, or none does.
  const auto ready = engine::agree(*parts.job.comm, kKeeping, [&] {
    state.checks.require_boundary(kKeeping);
    state.checks.require_no_scope(kKeeping, /*reading_too=*/false);
    if (root.empty()) throw ConfigError("[keep_snapshot] got an empty directory name");
    formats::check_user_state(state.user_state, kKeeping);
    if (!kept && memory.fd >= 0) kept = std::make_unique<Kept>(state, memory);
    return kept ? "yes" : "no";
  });
  if (std::find(ready.begin(), ready.end(), "no") == ready.end()) static_cast<Kept&>(*kept).keep(fs, root);
}

// --- after a restart --------------------------------------------------------------------------

KeptSnapshots::KeptSnapshots(engine::State& state, formats::FsOps& fs, const base::KeptMemory& memory,
                             const std::string& root)
    : attempt_(memory.attempt) {
  if (memory.fd < 0 || state.job.settings.checkpoint.keep_every == 0) return;
  const auto key = key_of(state, memory, root, state.exports.pieces_to_keep());
  for (int slot = 0; slot < base::kKeptSlots; ++slot) {
    slots_[slot] = std::make_unique<formats::KeptSlot>(fs, memory.fd, slot);
    if (auto header = slots_[slot]->read(); header && header->key == key) headers_[slot] = std::move(header);
  }
}

void KeptSnapshots::forget() {
  for (int slot = 0; slot < base::kKeptSlots; ++slot)
    if (std::exchange(headers_[slot], {})) slots_[slot]->begin();
}

std::string KeptSnapshots::Choice::name() const { return base::join("kept snapshot of step ", step, " (memory)"); }

std::string KeptSnapshots::offers() const {
  std::string lines;
  for (int slot = 0; slot < base::kKeptSlots; ++slot)
    if (const auto& header = headers_[slot]; header && header->attempt < attempt_)
      lines += base::join(header->attempt, " ", header->step, " ", slot, "\n");
  return lines;
}

std::optional<KeptSnapshots::Choice> KeptSnapshots::newest(const std::vector<std::string>& offers,
                                                           std::int64_t least_step) {
  using Offer = std::tuple<std::int64_t, std::int64_t, int>;
  std::optional<std::set<Offer>> common;
  for (const auto& lines : offers) {
    std::set<Offer> own;
    std::istringstream in(lines);
    for (Offer offer; in >> std::get<0>(offer) >> std::get<1>(offer) >> std::get<2>(offer);)
      if (!common || common->contains(offer)) own.insert(offer);
    common = std::move(own);
  }
  if (!common || common->empty()) return std::nullopt;
  const auto [attempt, step, slot] = *common->rbegin();
  return step < least_step ? std::nullopt : std::optional(Choice{slot, step});
}

formats::Manifest KeptSnapshots::manifest(int slot) {
  const auto& header = headers_[slot];
  ZERO_CHECK(header, "a kept snapshot in slot ", slot);
  auto manifest = formats::read_manifest(folder(slot), header->manifest_hash, formats::Extent::Rank);
  if (manifest.id != header->key || manifest.global_steps != header->step)
    formats::fail_damaged(folder(slot).path(), "has a header of another snapshot");
  return manifest;
}

}  // namespace zero::checkpoint
