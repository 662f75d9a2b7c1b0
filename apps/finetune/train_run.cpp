// The training loop of `zero train`. All ranks make the same forwards, collectives and saves; TrainReport hides what
// only rank 0 does.
#include "apps/finetune/train_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include <zero/checkpoint_tools.h>

#include "apps/finetune/train_signals.h"
#include "base/gathered_values.h"
#include "base/system.h"
#include "config/settings.h"
#include "tools/support/mesh_traffic.h"

namespace zero::cli {
namespace {

using Tier = MemoryReport::Tier;

// On a GPU, "device" is the count of its allocator, including activations.
report::MemoryPoint memory_point(report::Phase phase, const MemoryReport& memory) {
  const char* after = phase == report::Phase::AfterForward    ? "forward"
                      : phase == report::Phase::AfterBackward ? "backward"
                                                              : "step";
  report::MemoryPoint point{after, memory.current(Tier::Device), memory.peak(Tier::Device), memory.current(Tier::Host),
                            memory.peak(Tier::Host)};
  if (memory.allocator)
    point.device_bytes = memory.allocator->allocated, point.device_peak = memory.allocator->allocated_peak;
  return point;
}

// The message of each rank after a step.
struct Message {
  double loss, aux;
  std::int64_t weight;   // number of tokens
  std::int64_t samples;  // counted by one rank of those that share them
  int stop_signal;
  std::int64_t tokens;
};

// The sums over the ranks, in rank order; every rank has equally many numbers.
template <class Number>
std::vector<Number> sums_of(Communicator& comm, const std::vector<Number>& mine) {
  std::vector<Number> all(mine.size(), 0);
  if (mine.empty()) return all;
  for (const auto& theirs : base::all_gather_lists(comm, mine))
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += theirs.at(i);
  return all;
}

// The weighted mean of the losses, summed in rank order so that all ranks get the same bits. counts: equally many on
// every rank; become the sums over the ranks.
Message agree(Communicator& comm, const Message& mine, std::vector<std::int64_t>& counts) {
  const auto messages = base::all_gather_values(comm, mine);
  if (!counts.empty()) counts = sums_of(comm, counts);
  Message all{0, 0, 0, 0, 0, 0};
  for (const Message& part : messages) {
    if (part.weight > 0) {
      all.loss += part.loss * static_cast<double>(part.weight);
      all.aux += part.aux * static_cast<double>(part.weight);
    }
    all.weight += part.weight;
    all.samples += part.samples;
    all.tokens += part.tokens;
    all.stop_signal = std::max(all.stop_signal, part.stop_signal);
  }
  if (all.weight > 0) {
    all.loss /= static_cast<double>(all.weight);
    all.aux /= static_cast<double>(all.weight);
  }
  return all;
}

// Whether there is a checkpoint that a load can take. Rank 0 checks for all ranks, because new folders may become
// visible late on other hosts. A first save that was killed leaves a hidden folder.
bool any_checkpoint(Communicator& comm, const std::string& dir, bool weights_only) {
  std::error_code error;
  bool found = false;
  if (comm.rank() == 0 && std::filesystem::is_directory(dir, error)) {
    try {
      for (const auto& entry : list_checkpoints(dir)) found = found || weights_only || !entry.weights_only;
    } catch (const Error&) {
      found = true;  // the load says what is wrong, on all ranks
    }
  }
  return comm.all_gather_bytes(found ? "1" : "0").front() == "1";
}

// Whether a checkpoint has no parameter that fits one of the patterns "*SUFFIX". tag: empty for the newest. Rank 0
// looks for all ranks. If some are there, their shapes have to fit.
bool has_none(Communicator& comm, const std::string& dir, std::string tag, const std::vector<std::string>& patterns) {
  bool none = false;
  if (comm.rank() == 0 && !patterns.empty()) {
    try {
      if (tag.empty()) tag = list_checkpoints(dir).at(0).tag;
      const auto info = inspect_checkpoint(dir, tag);
      none = std::none_of(info.tensors.begin(), info.tensors.end(), [&](const CheckpointTensor& tensor) {
        return std::any_of(patterns.begin(), patterns.end(),
                           [&](const std::string& pattern) { return tensor.name.ends_with(pattern.substr(1)); });
      });
    } catch (const std::exception&) {
      // The load says what is wrong.
    }
  }
  return comm.all_gather_bytes(none ? "1" : "0").front() == "1";
}

// The run of the launcher, the same for all its restarts; empty: none.
std::string launched_run() {
  const char* id = std::getenv("ZERO_RUN_ID");
  return id ? id : "";
}

constexpr const char* kRunKey = "began_with_weights_in_run";

// Whether the launcher has started this run again after it took weights alone and saved checkpoints of its own.
bool goes_on_after_restart(Communicator& comm, const std::string& dir) {
  bool found = false;
  const char* count = std::getenv("ZERO_RESTART_COUNT");
  if (comm.rank() == 0 && count && std::string(count) != "0" && !launched_run().empty()) {
    try {
      const auto info = inspect_checkpoint(dir);
      const auto saved = nlohmann::json::parse(info.user_state, nullptr, false);
      found = !info.weights_only && saved.is_object() && saved.value(kRunKey, "") == launched_run();
    } catch (const std::exception&) {
      // Nothing to resume from; the load of the weights says what is wrong.
    }
  }
  return comm.all_gather_bytes(found ? "1" : "0").front() == "1";
}

}  // namespace

TrainRun::TrainRun(const TrainPlan& plan, TrainTask& task, Engine& engine, c10::Device device, TrainReport& report)
    : plan_(plan),
      task_(task),
      device_(device),
      engine_(engine),
      report_(report),
      comm_(engine.communicator()),
      mesh_(engine.mesh()),
      facts_(task.facts()),
      recorder_(plan, facts_, engine, device_, report.folder()) {}

double TrainRun::now() const {
  if (!device_.is_cpu()) at::accelerator::synchronizeDevice(device_.index());
  return base::steady_seconds();
}

// On a GPU the allocator's count, which includes activations.
std::uint64_t TrainRun::peak_bytes() const {
  const MemoryReport memory = engine_.memory();
  return memory.allocator ? memory.allocator->allocated_peak : memory.peak(Tier::Device);
}

// Of a run that is not resumed.
void TrainRun::take_initial_weights() {
  if (!plan_.init_from.empty()) import_weights();
  for (const auto& line : task_.take_initial_weights()) report_.note(LogLevel::Info, line);
}

void TrainRun::import_weights() {
  const auto report = engine_.import_weights(plan_.init_from, plan_.init);
  task_.took(report);
  constexpr std::size_t kNamed = 6;
  std::string missing;
  for (std::size_t i = 0; i < std::min(kNamed, report.missing.size()); ++i)
    missing += (i == 0 ? "; not in it: " : ", ") + report.missing[i];
  if (report.missing.size() > kNamed) missing += " and " + std::to_string(report.missing.size() - kNamed) + " more";
  report_.note(LogLevel::Info,
               "began with " + std::to_string(report.taken.size()) + " tensors of " + plan_.init_from + missing);
}

void TrainRun::resume() {
  if (plan_.resume.empty()) return take_initial_weights();
  bool newest = plan_.resume == "auto";
  LoadOptions options = plan_.load;
  if (options.weights_only && goes_on_after_restart(comm_, plan_.checkpoint_dir)) {
    options.weights_only = false;
    newest = true;
  }
  const bool on_disk = !newest || any_checkpoint(comm_, plan_.checkpoint_dir, options.weights_only);
  // An earlier attempt may have kept a snapshot before its first save.
  const bool in_memory = newest && !options.weights_only && plan_.options.settings().checkpoint.keep_every > 0 &&
                         base::number_in_env("ZERO_RESTART_COUNT", std::numeric_limits<int>::max()) > 0;
  // Not after a restart, which resumes from a checkpoint of this run.
  if (options.weights_only && on_disk && has_none(comm_, plan_.checkpoint_dir, newest ? "" : plan_.resume, plan_.added))
    options.partial.insert(options.partial.end(), plan_.added.begin(), plan_.added.end());
  std::string tag;
  try {
    if (on_disk || in_memory) tag = engine_.load_checkpoint(plan_.checkpoint_dir, newest ? "" : plan_.resume, options);
  } catch (const IoError& error) {
    if (on_disk || error.code() != ExitCode::kCheckpoint) throw;
  }
  if (tag.empty()) {
    report_.note(LogLevel::Info, "no checkpoint in " + plan_.checkpoint_dir + ": starting from the beginning");
    return take_initial_weights();
  }
  if (options.weights_only) {
    resumed_tag_ = tag;
    return report_.note(LogLevel::Info, "began with the weights of " + plan_.checkpoint_dir + "/" + tag);
  }
  const auto saved = nlohmann::json::parse(engine_.user_state(), nullptr, false);
  if (!saved.is_object() || !saved.contains("reader"))
    throw ConfigError("[--resume] got checkpoint " + plan_.checkpoint_dir + "/" + tag +
                          " without a position in the text, expected one that `zero train` wrote",
                      ExitCode::kCheckpoint);
  try {
    task_.restore(saved["reader"].dump());
  } catch (const std::runtime_error& error) {
    throw ConfigError(std::string("[--resume] ") + error.what());
  }
  const bool from_memory = tag.find(' ') != tag.npos;  // no tag has one
  if (!from_memory) resumed_tag_ = tag;
  // A run that was ended between a save and the removal of older checkpoints left one too many, each time.
  if (prunes() && comm_.rank() == 0) remove_old();
  if (from_memory)
    return report_.note(LogLevel::Info, "resumed from the " + tag + ", sample " + std::to_string(task_.position()));
  saved_step_ = engine_.global_step();
  report_.note(LogLevel::Info, "resumed from " + plan_.checkpoint_dir + "/" + tag + " at step " +
                                   std::to_string(saved_step_) + ", sample " + std::to_string(task_.position()));
}

void TrainRun::step(StepResult& result, report::StepRow& row) {
  const config::Settings& settings = plan_.options.settings();
  const std::int64_t accumulation = engine_.accumulation_steps(), micro = engine_.micro_batch_size();
  const bool recorded = engine_.global_step() == recorder_.step(), measured = engine_.global_step() == measured_step_;
  if (engine_.global_step() + 1 == recorder_.step()) {
    summary_.peak_bytes = std::max(summary_.peak_bytes, peak_bytes());
    engine_.reset_peak_memory();
  }
  const bool breakdown = settings.memory_breakdown && report_.prints(engine_.global_step() + 1);
  const auto note = [&](report::Phase phase) {
    if (!recorded && !measured && !breakdown) return;
    const MemoryReport memory = engine_.memory();
    if (recorded) recorder_.note(phase, memory);
    if (!measured && !breakdown) return;
    summary_.peak_bytes = std::max(summary_.peak_bytes, peak_bytes());
    engine_.reset_peak_memory();
    if (measured) summary_.memory.note(phase, memory);
    if (breakdown && phase != report::Phase::BeforeForward) row.memory.push_back(memory_point(phase, memory));
  };
  // Parts of the step, for wall_clock_breakdown.
  double at = 0, reduce_before = 0;
  const auto begin_part = [&] {
    if (settings.wall_clock_breakdown) at = now();
  };
  const auto end_part = [&](std::optional<double>& part) {
    if (settings.wall_clock_breakdown) part = part.value_or(0) + now() - at;
  };
  for (std::int64_t i = 0; i < accumulation; ++i) {
    const bool last = i + 1 == accumulation;
    task_.next(micro);
    if (last) note(report::Phase::BeforeForward);
    begin_part();
    task_.forward();
    end_part(row.forward_seconds);
    if (last) note(report::Phase::AfterForward);
    reduce_before = engine_.times().reduce_wait_s;
    begin_part();
    task_.backward();
    end_part(row.backward_seconds);
    if (settings.wall_clock_breakdown)
      row.reduce_seconds = row.reduce_seconds.value_or(0) + engine_.times().reduce_wait_s - reduce_before;
    if (last) note(report::Phase::AfterBackward);
    begin_part();
    result = engine_.step();
    end_part(row.update_seconds);
    if (last) note(report::Phase::AfterStep);
  }
}

void TrainRun::note_position() {
  nlohmann::json state{{"reader", nlohmann::json::parse(task_.reader_state())}};
  if (plan_.load.weights_only && !launched_run().empty()) state[kRunKey] = launched_run();
  engine_.set_user_state(state.dump());
}

void TrainRun::keep_snapshot() {
  const std::int64_t every = plan_.options.settings().checkpoint.keep_every, step = engine_.global_step();
  if (every == 0 || plan_.checkpoint_dir.empty() || step % every != 0 || step == plan_.steps) return;
  note_position();
  engine_.keep_snapshot(plan_.checkpoint_dir);
}

void TrainRun::save() {
  if (plan_.checkpoint_dir.empty() || engine_.global_step() == saved_step_) return;
  note_position();
  save_under("global_step" + std::to_string(engine_.global_step()), {});
  saved_step_ = engine_.global_step();
}

void TrainRun::save_weights() {
  save_under("weights_step" + std::to_string(engine_.global_step()), {.weights_only = true});
}

void TrainRun::save_under(const std::string& tag, const SaveOptions& options) {
  complete_save();  // save_checkpoint() would, and nobody would be told
  save_begun_ = base::steady_seconds();
  engine_.save_checkpoint(plan_.checkpoint_dir, tag, options);
  saving_ = tag;
  saving_weights_ = options.weights_only;
  note_saved();
}

// Of a save in the background: when a step has completed it.
void TrainRun::note_saved() {
  if (saving_.empty() || engine_.checkpoint_pending()) return;
  const auto tag = std::exchange(saving_, {}), saved = plan_.checkpoint_dir + "/" + tag;
  if (engine_.finish_checkpoint() != tag) {  // libzero.save_errors "warn"; the engine has said why
    if (!saving_weights_) saved_step_ = -1;
    return;
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.2f s", base::steady_seconds() - save_begun_);
  report_.note(LogLevel::Info,
               "saved " + std::string(saving_weights_ ? "the weights in " : "") + saved + " in " + seconds);
  if (!saving_weights_) {
    summary_.checkpoint = saved;
    if (plan_.resume == "auto") resumed_tag_.clear();  // the next start takes this one; a named one is needed again
  }
  if (prunes() && engine_.communicator().rank() == 0) remove_old();
}

void TrainRun::complete_save() {
  if (engine_.checkpoint_pending()) engine_.finish_checkpoint();
  note_saved();
}

// There is no later save that could make up for a failed one.
void TrainRun::save_last() {
  do {
    save();
    complete_save();
  } while (!plan_.checkpoint_dir.empty() && saved_step_ != engine_.global_step());
}

// A checkpoint that cannot be removed must not end the run.
void TrainRun::remove_old() {
  PruneOptions options{.keep = plan_.keep > 0 ? plan_.keep : std::numeric_limits<std::int64_t>::max(),
                       .keep_every = plan_.keep_every,
                       .keep_weights = plan_.keep_weights,
                       .also = {}};
  if (!resumed_tag_.empty()) options.also.push_back(resumed_tag_);
  try {
    for (const auto& entry : prune_checkpoints(plan_.checkpoint_dir, options))
      report_.note(LogLevel::Info, "removed " + plan_.checkpoint_dir + "/" + entry.tag);
  } catch (const Error& e) {
    report_.note(LogLevel::Warning, std::string("old checkpoints stay: ") + e.what());
  }
}

void TrainRun::end_trace() {
  if (plan_.trace.empty()) return;
  summary_.trace = engine_.stop_trace();
  if (summary_.trace->steps > 0) recorder_.take_trace(summary_.trace->file);
  if (summary_.trace->steps == 0)
    report_.note(LogLevel::Warning, "the trace is empty: the run ended before step " +
                                        std::to_string(plan_.trace_steps.first) + " of it. Hint: --trace-steps 1:");
}

// Into the summary, in place of an earlier evaluation.
void TrainRun::evaluate() {
  if (task_.heldout_samples() == 0) return;
  const double begin = base::steady_seconds();
  TaskScores mine = task_.evaluate();
  if (mine.weight > 0) mine.loss /= static_cast<double>(mine.weight);
  std::vector<std::int64_t> no_counts;
  const Message all = agree(comm_, {mine.loss, 0, mine.weight, mine.samples, 0, 0}, no_counts);
  summary_.heldout = all.loss;
  summary_.heldout_samples = all.samples;
  summary_.metrics =
      task_.metrics({all.loss * static_cast<double>(all.weight), all.weight, all.samples, sums_of(comm_, mine.sums)});
  evaluation_seconds_ = base::steady_seconds() - begin;
}

// After the step's line and save, which a fault here must not lose; not while a signal waits.
void TrainRun::evaluate_between_steps() {
  const std::int64_t step = engine_.global_step();
  if (plan_.eval_every == 0 || step % plan_.eval_every != 0 || step >= plan_.steps || summary_.stopped_by != 0) return;
  engine_.flush();
  evaluate();
  report_evaluation();
}

std::int64_t TrainRun::samples_per_step() const {
  return engine_.micro_batch_size() * engine_.accumulation_steps() * mesh_.size("dp");
}

void TrainRun::report_evaluation() {
  if (plan_.eval_every == 0 || !summary_.heldout) return;
  const std::int64_t step = engine_.global_step();
  report_.evaluated({step, plan_.steps, *summary_.heldout, summary_.metrics}, step * samples_per_step());
}

double TrainRun::evaluations_left(std::int64_t step) const {
  const auto between = plan_.eval_every > 0 ? (plan_.steps - 1) / plan_.eval_every - step / plan_.eval_every : 0;
  return static_cast<double>(between) + 1;
}

void TrainRun::write_samples() {
  for (TaskSample& sample : task_.samples())
    if (sample.remark.empty())
      summary_.samples.push_back(std::move(sample));
    else
      report_.note(LogLevel::Info, "no sample: " + sample.remark);
  if (summary_.samples.empty()) return;
  // At stage 3 a rank reads its peers' shards until its last token, so no rank may leave before. (On one host an
  // unshard does not wait, and the shards of a rank that leaves early would disappear.)
  comm_.barrier();
}

void TrainRun::export_weights() {
  if (plan_.export_to.empty()) return;
  if (comm_.all_gather_bytes(plan_.is_exported ? "1" : "0").front() == "1")
    return report_.note(LogLevel::Info, plan_.export_to + " was exported before the restart");
  const auto begin = now();
  const auto report = task_.export_weights(plan_.export_to, plan_.exported);
  char text[64];
  std::snprintf(text, sizeof text, "%lld bytes in %.2f s", static_cast<long long>(report.bytes), now() - begin);
  for (const auto& remark : report.remarks) report_.note(LogLevel::Info, "--export: " + remark);
  report_.note(LogLevel::Info, "exported " + plan_.export_to + ": " + text);
}

int TrainRun::run() {
  const StopSignals signals(report_.draws());
  if (plan_.eval_every > 0 && plan_.options.settings().zero.delayed_update.enabled)
    report_.note(LogLevel::Warning,
                 "--eval-every completes the delayed update before each evaluation, as a save does: the steps after it "
                 "differ from those of a run without it");
  if (!plan_.trace.empty()) engine_.start_trace(plan_.trace, plan_.trace_steps);
  resume();
  const std::int64_t first = engine_.global_step();
  recorder_.begin(first);
  measured_step_ = std::min(recorder_.step() + 1, plan_.steps - 1);
  // Measuring frees idle buffers, which belong to the recorded step's peak.
  if (measured_step_ == recorder_.step()) measured_step_ = engine_.global_step();
  const double tokens_per_step = static_cast<double>(samples_per_step() * facts_.tokens_per_sample);
  summary_.loss_unit = facts_.loss_unit;
  summary_.mesh = degrees_of(mesh_, plan_.options.settings().model.experts.degree());
  std::vector<double> losses;
  double all_tokens = 0;
  while (engine_.global_step() < plan_.steps && summary_.stopped_by == 0) {
    const double begin = base::steady_seconds();
    const CommStats before = comm_.stats();
    const bool recorded = engine_.global_step() == recorder_.step();
    if (recorded) recorder_.begin_step();
    report::StepRow row;
    StepResult result;
    step(result, row);
    const TaskLosses own = task_.take_losses();
    auto counts = task_.take_expert_counts();
    const Message all = agree(comm_, {own.loss, own.aux, own.weight, 0, StopSignals::requested(), own.tokens}, counts);
    summary_.stopped_by = all.stop_signal;
    const double seconds = base::steady_seconds() - begin;
    summary_.seconds += seconds;
    losses.push_back(all.loss);
    const double tokens = all.tokens > 0 ? static_cast<double>(all.tokens) : tokens_per_step;
    all_tokens += tokens;
    const auto done = static_cast<double>(losses.size());

    row.step = result.global_step;
    row.steps = plan_.steps;
    row.loss = all.loss;
    row.grad_norm = result.grad_norm < 0 ? std::numeric_limits<double>::quiet_NaN() : result.grad_norm;
    row.lr = result.lr;
    row.loss_scale = result.loss_scale;
    row.skipped = engine_.skipped_steps();
    row.memory_bytes = std::max(summary_.peak_bytes, peak_bytes());
    row.step_seconds = seconds;
    row.tokens_per_s = tokens / seconds;
    const CommStats after = comm_.stats();
    row.ranks = comm_.size();
    row.bytes_sent = after.bytes_sent() - before.bytes_sent();
    if (summary_.mesh.exchange_activations())
      summary_.sent = row.sent_by_axis = sent_between(before, after, summary_.mesh);
    if (!counts.empty()) {
      const auto load = task_.expert_load(counts, result.global_step);
      row.aux_loss = all.aux;
      row.load_max = load.max_over_mean();
      row.dropped = load.dropped();
      report_.load(load);
    }
    if (result.global_step < plan_.steps)
      row.eta_seconds = summary_.seconds / done * static_cast<double>(plan_.steps - result.global_step) +
                        evaluation_seconds_ * evaluations_left(result.global_step);
    report_.step(row, result.global_step * samples_per_step());
    if (recorded) recorder_.end_step();
    note_saved();
    keep_snapshot();
    if (plan_.weights_only_every > 0 && result.global_step % plan_.weights_only_every == 0) save_weights();
    if (plan_.save_every > 0 && result.global_step % plan_.save_every == 0) save();
    evaluate_between_steps();
  }
  summary_.steps = engine_.global_step();
  summary_.skipped = engine_.skipped_steps();
  if (losses.empty()) summary_.final_loss = std::numeric_limits<double>::quiet_NaN();
  if (!losses.empty()) {
    const std::size_t tail = std::clamp<std::size_t>(losses.size() / 10, 1, 50);
    for (std::size_t i = losses.size() - tail; i < losses.size(); ++i)
      summary_.final_loss += losses[i] / static_cast<double>(tail);
    summary_.tokens_per_s = all_tokens / summary_.seconds;
  }
  summary_.peak_bytes = std::max(summary_.peak_bytes, peak_bytes());
  if (plan_.steps > 0) save_last();
  end_trace();
  if (summary_.stopped_by == 0) {
    engine_.flush();
    // First the weights, so that a fault in the rest loses nothing.
    export_weights();
    evaluate();
    report_evaluation();
    recorder_.take_metrics(summary_.metrics);
    write_samples();
  } else {
    summary_.heldout.reset();  // of an earlier step
    summary_.metrics.clear();
    summary_.heldout_samples = 0;
  }
  report_.finish(summary_);
  if (summary_.stopped_by == 0) return 0;
  const bool saved = !plan_.checkpoint_dir.empty();
  report_.note(LogLevel::Warning,
               "stopped by signal " + std::to_string(summary_.stopped_by) + " after step " +
                   std::to_string(summary_.steps) +
                   (saved ? ", state saved in " + summary_.checkpoint + ": continue with --resume auto"
                          : "; nothing was saved: there is no --checkpoint-dir"));
  return saved ? 75 : 143;
}

}  // namespace zero::cli
