// See byte_task.h. Samples, tokens and exchanges of a mesh are those of tools/support/gpt_mesh.h.
#include "apps/finetune/byte_task.h"

#include <algorithm>
#include <utility>

#include <zero/plan.h>

#include "config/settings.h"
#include "tools/report/text/text.h"
#include "tools/support/gpt_segments.h"

namespace zero::cli {

ByteTask::ByteTask(const TrainPlan& plan) : plan_(plan) {
  try {
    corpus_ =
        std::make_unique<data::Corpus>(plan.text, plan.model.sequence, plan.holdout, plan.options.settings().seed);
  } catch (const std::exception& error) {
    throw ConfigError(error.what());
  }
}

Options ByteTask::fit(const Options& options, int world) {
  return with_room_for_activations(options, plan_.model, plan_.segments, world);
}

std::shared_ptr<torch::nn::Module> ByteTask::build(c10::Device device) {
  model_ = zero::build([&] { return models::Gpt(plan_.model); }, device);
  place_segments(model_, plan_.segments);
  device_ = device;
  return model_.ptr();
}

void ByteTask::begin(Engine& engine) {
  engine_ = &engine;
  device_ = model_->parameters().front().device();
  share_.emplace(model_, engine.mesh(), plan_.options);
  experts_.emplace(model_);
  reader_.emplace(*corpus_, engine.mesh().rank("dp"), engine.mesh().size("dp"));
}

TaskFacts ByteTask::facts() const {
  const config::Settings& s = plan_.options.settings();
  const models::GptConfig& shape = plan_.model;
  const PlanModel model = PlanModel::of_options(plan_.options);
  TaskFacts facts;
  facts.model.push_back("model " + report::human_count(static_cast<double>(model.num_parameters())) + " parameters: " +
                        std::to_string(shape.layers) + " layers, hidden " + std::to_string(shape.hidden) + ", " +
                        std::to_string(shape.heads) + " heads, sequence " + std::to_string(shape.sequence));
  if (const auto& experts = s.model.experts; experts.num_experts > 0)
    facts.model.push_back("experts: " + std::to_string(experts.num_experts) + " in each of " +
                          std::to_string(shape.layers / experts.expert_interval) + " layers, " +
                          std::to_string(experts.num_experts / experts.ep_size) + " of them on a rank, " +
                          std::to_string(experts.k) + " for a token, which computes with " +
                          report::human_count(static_cast<double>(model.num_active_parameters())) + " parameters");
  facts.data = "text " + plan_.text + ": " + report::human_bytes(static_cast<std::uint64_t>(corpus_->bytes())) + ", " +
               std::to_string(corpus_->training_samples()) + " samples, " + std::to_string(corpus_->heldout_samples()) +
               " held out";
  if (plan_.segments > 0)
    facts.memory.push_back("activation checkpointing: " + std::to_string(plan_.segments) + " segments of " +
                           std::to_string(shape.layers) + " layers run again in backward; their inputs wait in " +
                           (!s.activations.file_path.empty() ? "a file in " + s.activations.file_path
                            : s.activations.to_host          ? "host memory"
                                                             : "the device's memory"));
  facts.data_name = plan_.text;
  facts.parameters = model.num_parameters();
  facts.own_parameters = elements_of(*model_);
  facts.tokens_per_sample = shape.sequence;
  facts.rows = {{"parameters", std::to_string(facts.parameters)}, {"layers", std::to_string(shape.layers)},
                {"hidden", std::to_string(shape.hidden)},         {"heads", std::to_string(shape.heads)},
                {"sequence", std::to_string(shape.sequence)},     {"vocabulary", std::to_string(shape.vocabulary)}};
  if (const auto& experts = s.model.experts; experts.num_experts > 0) {
    facts.rows.emplace_back("experts of a layer", std::to_string(experts.num_experts));
    facts.rows.emplace_back("experts of a token", std::to_string(experts.k));
  }
  facts.plannable = true;
  return facts;
}

at::Tensor ByteTask::batch(const std::vector<const std::uint8_t*>& samples) const {
  const std::int64_t length = corpus_->sequence() + 1;
  at::Tensor tokens = torch::empty({static_cast<std::int64_t>(samples.size()), length}, torch::kLong);
  std::int64_t* out = tokens.mutable_data_ptr<std::int64_t>();
  for (const std::uint8_t* sample : samples) out = std::copy(sample, sample + length, out);
  return tokens.to(device_);
}

void ByteTask::next(std::int64_t samples) {
  // Depends only on the data position, so that a resumed run draws the same numbers.
  if (plan_.model.dropout > 0 || experts_->any())
    torch::manual_seed(plan_.options.settings().seed * 1000003 + static_cast<std::uint64_t>(position()) * 1009 +
                       static_cast<std::uint64_t>(engine_->mesh().rank("dp_sp")));
  samples_ = batch(reader_->next(samples));
}

void ByteTask::forward() {
  loss_ = share_->loss_of(samples_);
  experts_->note();
}

void ByteTask::backward() {
  share_->backward(*engine_, loss_, samples_.size(0));
  sums_.loss += loss_.item<double>();
  if (experts_->any()) sums_.aux += share_->last_aux_loss().item<double>();
  ++micro_batches_;
  loss_.reset();
  samples_.reset();
}

TaskLosses ByteTask::take_losses() {
  const auto count = static_cast<double>(std::exchange(micro_batches_, 0));
  const TaskLosses sums = std::exchange(sums_, {});
  return {sums.loss / count, sums.aux / count, share_->tokens_in(1)};
}

TaskScores ByteTask::evaluate() {
  const Mesh& mesh = engine_->mesh();
  const std::int64_t held = corpus_->heldout_samples(), micro = engine_->micro_batch_size(), ranks = mesh.size("dp"),
                     own = mesh.rank("dp");
  const std::int64_t wanted = plan_.eval_batches > 0 ? std::min(held, plan_.eval_batches * micro * ranks) : held;
  const torch::NoGradGuard no_grad;
  model_->eval();
  TaskScores mine;
  // All ranks make the same number of forwards, because at stage 3 these are collectives; a rank without samples left
  // repeats one that does not count.
  for (std::int64_t first = own * micro; first - own * micro < wanted; first += micro * ranks) {
    std::vector<const std::uint8_t*> samples;
    for (std::int64_t i = first; i < std::min(first + micro, wanted); ++i)
      samples.push_back(corpus_->heldout(i * held / wanted));
    const auto count = static_cast<std::int64_t>(samples.size());
    if (count == 0) samples.push_back(corpus_->heldout(0));
    mine.loss += share_->loss_of(batch(samples)).item<double>() * static_cast<double>(share_->tokens_in(count));
    mine.weight += share_->tokens_in(count);
    if (mesh.rank("sp") == 0 && mesh.rank("tp") == 0) mine.samples += count;
  }
  model_->train();
  return mine;
}

std::vector<TaskSample> ByteTask::samples() {
  if (plan_.sample == 0) return {};
  if (plan_.options.settings().mesh.plan.vocab_parallel_lm_head && engine_->mesh().size("tp") > 1)
    return {{.remark = "with vocab_parallel_lm_head no rank has whole logits"}};
  share_->divide_sequences(false);  // every rank generates the whole text
  const std::uint8_t* text = corpus_->heldout_samples() > 0 ? corpus_->heldout(0) : corpus_->training(0);
  const std::int64_t length = std::min<std::int64_t>(corpus_->sequence(), 40);
  const at::Tensor prompt = batch({text}).narrow(1, 0, length);
  // The same on every rank: equal weights and an equal generator choose the same bytes.
  const at::Tensor said = model_->generate(prompt, plan_.sample, {.temperature = 0.8, .top_k = 40, .seed = 1}).cpu();
  TaskSample sample;
  sample.prompt.assign(text, text + length);
  const std::int64_t* tokens = said.const_data_ptr<std::int64_t>();
  for (std::int64_t i = length; i < said.numel(); ++i)
    sample.text += tokens[i] < 256 ? static_cast<char>(tokens[i]) : '?';
  return {sample};
}

ExportReport ByteTask::export_weights(const std::string& folder, const ExportOptions& options) {
  return engine_->export_weights(folder, options);
}

}  // namespace zero::cli
