// Writes a checkpoint: every rank its states, rank 0 the manifest. docs/checkpoints.md has the steps.
#include "checkpoint/save.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/background.h"
#include "checkpoint/weights.h"
#include "engine/rank_agreement.h"
#include "engine/replicas.h"
#include "formats/hash.h"
#include "formats/rank_report.h"
#include "observe/status_page.h"

namespace zero::checkpoint {
namespace {

constexpr const char* kWhere = "save_checkpoint";

// Steps that experts of other ranks missed.
std::map<std::string, std::int64_t> missed_steps(engine::State& state) {
  std::map<std::string, std::int64_t> result;
  if (!state.parts.experts) return result;
  for (const auto& text : engine::agree(*state.job.comm, kWhere, [&] {
         std::string lines;
         for (const auto& [name, steps] : state.exports.counters().missed_steps)
           lines += base::join(steps, " ", name, "\n");
         return lines;
       })) {
    std::istringstream in(text);
    std::int64_t steps = 0;
    for (std::string name; in >> steps && in.get() && std::getline(in, name);) result[name] = steps;
  }
  return result;
}

struct SavePhase {
  SavePhase() { observe::status_page().set_phase(observe::StatusPhase::Save); }
  ~SavePhase() {
    observe::status_page().set_unit("");
    observe::status_page().set_phase(observe::StatusPhase::Idle);
  }
};

}  // namespace

Save::Save(engine::State& state, formats::FsOps& fs, std::string root, const SaveOptions& options)
    : state_(state), comm_(*state.job.comm), fs_(fs), root_(std::move(root)), options_(options) {}

void Save::begin(const std::string& wanted_tag) {
  state_.stepper.flush();
  agree_on_request(wanted_tag);
  engine::compare_tensor_parallel_ranks(state_.parts, kWhere);
  const auto missed = missed_steps(state_);
  (void)engine::agree(comm_, kWhere, [&] {
    if (!options_.weights_only) pieces_.push_back(generator_piece(state_));
    if (comm_.rank() != 0) return "";
    manifest_ = manifest_of(state_);
    manifest_.missed_steps.insert(missed.begin(), missed.end());
    if (options_.exclude_frozen)
      std::erase_if(manifest_.tensors, [](const formats::Tensor& tensor) { return tensor.kind == kFrozen; });
    if (!options_.weights_only) return "";
    manifest_.slots.clear();
    manifest_.set_rates.clear();
    manifest_.missed_steps.clear();
    std::erase_if(manifest_.tensors, [](const formats::Tensor& tensor) { return is_slot(tensor.kind); });
    return "";
  });
  begin_commit();
  // Now, because the ranks exchange parts of pages: a save in the background must not use the communicator later.
  if (state_.job.settings.checkpoint.export_weights)
    exported_ = write_weight_files(state_, fs_, root_ + "/" + folder_, kWhere);
}

Save::Intent Save::intent_in(const std::string& text) {
  const auto first = text.find('\n'), second = text.find('\n', first + 1);
  ZERO_CHECK(first != std::string::npos && second != std::string::npos, "a rank's intent");
  return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

// All ranks request the same save, at a valid time.
void Save::agree_on_request(const std::string& wanted_tag) {
  (void)engine::agree(comm_, kWhere, [&] {
    state_.checks.require_between_passes(kWhere);
    state_.checks.require_no_scope(kWhere, /*reading_too=*/false);
    return "";
  });
  if (state_.parts.experts) state_.parts.experts->share_buffers();
  const auto texts = engine::agree(comm_, kWhere, [&] {
    if (root_.empty()) throw ConfigError("[save_checkpoint] got an empty directory name");
    if (!formats::valid_tag(wanted_tag))
      throw ConfigError(
          "[save_checkpoint] got the tag \"" + wanted_tag +
          "\", expected a letter or digit and then up to 127 letters, digits, '.', '_' or '-', and not \"latest\"");
    formats::check_user_state(state_.user_state, kWhere);
    pieces_ = state_.exports.pieces_to_save();
    if (options_.weights_only)
      std::erase_if(pieces_,
                    [](const engine::StatePiece& piece) { return is_slot(piece.kind) || piece.kind == kPrivate; });
    if (options_.exclude_frozen)
      std::erase_if(pieces_, [](const engine::StatePiece& piece) { return piece.kind == kFrozen; });
    std::string text =
        base::join(wanted_tag, "\n", state_.parts.program->steps(), options_.weights_only ? ", weights only" : "",
                   options_.exclude_frozen ? ", without frozen parameters\n" : "\n");
    for (const auto& piece : pieces_) (void)file_dtype(piece.dtype, piece.name);
    return text + hashes_of_buffers(pieces_);
  });
  std::vector<Intent> intents;
  for (const auto& text : texts) {
    intents.push_back(intent_in(text));
    buffers_.push_back(intents.back().buffers);
  }
  tag_ = intents[0].tag;
  (void)engine::agree(comm_, kWhere, [&] {
    const auto& rule = state_.job.settings.checkpoint.tag_validation;
    for (std::size_t r = 1; r < intents.size(); ++r) {
      const auto difference =
          base::join("[save_checkpoint] rank ", r, " saves the tag \"", intents[r].tag, "\", rank 0 \"", tag_, "\"");
      if (intents[r].tag != tag_ && rule == "Fail")
        throw ConfigError(difference + ". Hint: all ranks must pass the same tag (checkpoint.tag_validation).");
      if (intents[r].tag != tag_ && rule == "Warn" && comm_.rank() == 0)
        base::log(LogLevel::Warning, difference + "; rank 0's is taken");
      constexpr std::size_t kDigits = 32;  // of the hash of a buffer
      if (intents[r].buffers.size() != intents[0].buffers.size())
        throw ConfigError(base::join("[save_checkpoint] rank ", r, " has ", intents[r].buffers.size() / kDigits,
                                     " buffers to save, rank 0 ", intents[0].buffers.size() / kDigits,
                                     ". Hint: the modules of all ranks register the same buffers."));
      if (intents[r].step != intents[0].step)
        throw ConfigError(base::join("[save_checkpoint] rank ", r, " saves after step ", intents[r].step,
                                     ", rank 0 after ", intents[0].step,
                                     ". Hint: all ranks must call it at the same place."));
    }
    return "";
  });
}

// Rank 0 inspects the directory.
void Save::begin_commit() {
  const auto answers = engine::agree_while_moving(comm_, kWhere, formats::bytes_moved(), [&]() -> std::string {
    if (comm_.rank() != 0) return "";
    commit_.emplace(fs_, root_, tag_, options_.weights_only);
    return commit_->folder_name() + "\n" + commit_->previous();
  });
  const auto end = answers[0].find('\n');
  folder_ = answers[0].substr(0, end);
  previous_ = answers[0].substr(end + 1);
}

formats::Source source_from(const engine::StatePiece& piece, std::size_t number, const ReadPiece& read) {
  formats::Source source;
  source.kind = piece.kind;
  source.name = piece.name;
  source.dtype = file_dtype(piece.dtype, piece.name);
  source.shape = piece.shape;
  source.requires_grad = piece.requires_grad;
  source.start = piece.begin;
  source.numel = piece.numel;
  source.read = [number, read](std::int64_t at, std::int64_t numel) { return read(number, at, numel); };
  source.must_be_finite = piece.kind == "master" || is_slot(piece.kind);
  return source;
}

std::string Save::write(const ReadPiece& read) {
  std::vector<formats::Source> states, frozen, own;
  std::size_t buffer = 0;
  bytes_ = 0;
  for (std::size_t p = 0; p < pieces_.size(); ++p) {
    const auto& piece = pieces_[p];
    const auto add_to = [&](std::vector<formats::Source>& list) {
      list.push_back(source_from(piece, p, read));
      bytes_ += static_cast<std::uint64_t>(piece.numel) * c10::elementSize(piece.dtype);
    };
    if (piece.kind == kPrivate)
      add_to(own);
    else if (piece.kind == kFrozen)
      add_to(frozen);
    else if (piece.kind != kBuffer)
      add_to(states);
    else if (const bool shared = is_shared(buffers_, buffer++); !shared)
      add_to(own);
    else if (comm_.rank() == 0)
      add_to(states);
  }
  const auto num_shared = states.size();
  states.insert(states.end(), own.begin(), own.end());

  const auto root = formats::Folder::open(fs_, root_);
  const auto folder = root.folder(folder_);
  formats::RankReport report;
  report.add(formats::write_rank_file(folder, formats::rank_file_name(comm_.rank()), states), num_shared);
  if (!frozen.empty()) report.add(write_frozen(root, folder, frozen), frozen.size());
  // What all ranks wrote, each rank reads some of it back for its hashes.
  for (std::size_t i = 0; i < exported_.size(); ++i)
    if (static_cast<int>(i) % comm_.size() == comm_.rank()) report.add(formats::hash_file(folder, exported_[i]));
  return formats::write_report(folder, comm_.rank(), report);
}

// Frozen parameters do not change from save to save.
formats::RankFile Save::write_frozen(const formats::Folder& root, const formats::Folder& folder,
                                     const std::vector<formats::Source>& frozen) {
  const auto name = formats::frozen_file_name(comm_.rank());
  if (!previous_.empty() && root.exists(previous_)) {
    const auto previous = root.folder(previous_);
    if (const auto file = formats::listed_file(previous, name)) {
      const formats::Previous from{&previous, *file};
      return formats::link_or_write_rank_file(folder, name, frozen, &from);
    }
  }
  return formats::write_rank_file(folder, name, frozen);
}

void Save::publish(const std::vector<std::string>& reports) {
  (void)engine::agree_while_moving(comm_, kWhere, formats::bytes_moved(), [&] {
    if (comm_.rank() != 0) return "";
    const auto folder = formats::Folder::open(fs_, root_).folder(folder_);
    formats::ManifestMerge merge(manifest_);
    for (std::size_t r = 0; r < reports.size(); ++r)
      merge.add(formats::take_report(folder, static_cast<int>(r), reports[r]));
    merge.finish(folder);
    commit_->publish(std::move(manifest_));
    return "";
  });
  observe::status_page().note_commit();
}

void save(engine::State& state, formats::FsOps& fs, const std::string& root, const std::string& tag,
          const SaveOptions& options) {
  (void)finish_save(state);
  state.parts.progress.saved_tag.clear();
  const SavePhase phase;
  const at::NoGradGuard no_grad;
  auto save = std::make_unique<Save>(state, fs, root, options);
  save->begin(tag);
  if (state.job.settings.checkpoint.decoupled) return write_in_background(state, std::move(save));
  const auto read = [&](std::size_t number, std::int64_t at, std::int64_t numel) {
    const auto& piece = save->pieces()[number];
    // Shows progress on the status page.
    observe::status_page().set_unit(formats::key_of(piece.kind, piece.name, piece.begin + at));
    const auto values = std::make_shared<at::Tensor>(piece.read(at, numel));
    return std::shared_ptr<const void>(values, values->const_data_ptr());
  };
  save->publish(
      engine::agree_while_moving(*state.job.comm, kWhere, formats::bytes_moved(), [&] { return save->write(read); }));
  state.parts.progress.saved_tag = save->tag();
}

}  // namespace zero::checkpoint
