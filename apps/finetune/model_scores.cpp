// Evaluation of ModelTask and its sample: losses, classes, answers that are chosen in a context or generated.
#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/data/metrics.h"
#include "apps/finetune/model_task.h"
#include "config/document.h"
#include "config/settings.h"
#include "tools/support/whole_file.h"

namespace zero::cli {
namespace {

constexpr std::int64_t kPromptTokens = 16;  // of running text that a sample continues

// One window's scores, as bytes that ranks exchange: its index, then two scores for each of `tokens` tokens.
void append_window(std::string& bytes, std::int64_t index, const at::Tensor& scores, std::int64_t tokens) {
  bytes.append(reinterpret_cast<const char*>(&index), sizeof index);
  std::vector<float> row(static_cast<std::size_t>(tokens));
  for (int side = 0; side < 2; ++side) {
    std::fill(row.begin(), row.end(), -std::numeric_limits<float>::infinity());
    const at::Tensor values = scores.select(0, side).to(torch::kFloat).cpu().contiguous();
    std::copy_n(values.const_data_ptr<float>(), std::min(values.numel(), tokens), row.begin());
    bytes.append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(float));
  }
}

struct Window {
  std::int64_t index = 0;
  std::vector<float> start, end;
};

std::vector<Window> windows_in(const std::string& bytes, std::int64_t tokens) {
  const auto row = static_cast<std::size_t>(tokens) * sizeof(float), whole = sizeof(std::int64_t) + 2 * row;
  std::vector<Window> windows;
  for (std::size_t at = 0; at + whole <= bytes.size(); at += whole) {
    Window window;
    std::memcpy(&window.index, bytes.data() + at, sizeof window.index);
    window.start.resize(static_cast<std::size_t>(tokens));
    window.end.resize(static_cast<std::size_t>(tokens));
    std::memcpy(window.start.data(), bytes.data() + at + sizeof window.index, row);
    std::memcpy(window.end.data(), bytes.data() + at + sizeof window.index + row, row);
    windows.push_back(std::move(window));
  }
  return windows;
}

}  // namespace

bool ModelTask::by_generation() const {
  return model_plan_.task == "qa" && examples_->options().task != data::Task::Qa;
}

void ModelTask::note_answer(TaskScores& scores, std::int64_t record, const std::string& text) {
  const auto references = examples_->references(record);
  scores.sums[0] += data::exact_match(text, references);
  scores.sums[1] += data::answer_f1(text, references);
  scores.sums[2] += 1;
  // A generated answer begins with the blank after "Answer:".
  if (!model_plan_.predictions.empty())
    answers_[record] = text.substr(std::min(text.find_first_not_of(' '), text.size()));
}

TaskScores ModelTask::evaluate() {
  const torch::NoGradGuard no_grad;
  module_->eval();
  answers_.clear();
  TaskScores mine;
  if (model_plan_.task == "classify") mine.sums.assign(1, 0);
  if (model_plan_.task == "qa") mine.sums.assign(3, 0);
  evaluate_samples(mine);
  if (by_generation()) evaluate_answers(mine);
  if (!model_plan_.predictions.empty()) write_predictions();
  module_->train();
  return mine;
}

// All ranks make the same number of forwards, because at stage 3 these are collectives; a rank without samples left
// repeats one that does not count.
void ModelTask::evaluate_samples(TaskScores& mine) {
  const std::int64_t held = examples_->heldout_samples(), micro = engine_->micro_batch_size(),
                     ranks = engine_->mesh().size("dp"), own = engine_->mesh().rank("dp");
  const bool limited = plan_.options.document().is_set("libzero.data.eval_batches") && plan_.eval_batches > 0;
  const std::int64_t wanted = limited ? std::min(held, plan_.eval_batches * micro * ranks) : held;
  const data::Task task = examples_->options().task;
  std::string windows;
  for (std::int64_t first = own * micro; first - own * micro < wanted; first += micro * ranks) {
    std::vector<data::Sample> samples;
    std::vector<std::int64_t> numbers;
    for (std::int64_t i = first; i < std::min(first + micro, wanted); ++i) {
      numbers.push_back(i * held / wanted);
      samples.push_back(examples_->heldout(numbers.back()));
    }
    const auto count = static_cast<std::int64_t>(samples.size());
    if (count == 0) samples.push_back(examples_->heldout(0));
    const Batch batch = batch_of(samples, task, device_);
    const auto [loss, scores] = family_->evaluate(batch);
    if (count == 0) continue;
    mine.loss += loss.item<double>() * static_cast<double>(batch.targets);
    mine.weight += batch.targets;
    mine.samples += count;
    if (task == data::Task::Classify) mine.sums[0] += scores.argmax(-1).eq(batch.label).sum().item<double>();
    if (task == data::Task::Qa)
      for (std::int64_t i = 0; i < count; ++i)
        append_window(windows, numbers[static_cast<std::size_t>(i)], scores.select(0, i),
                      examples_->options().sequence);
  }
  if (task != data::Task::Qa) return;
  // Windows of one question may be on several ranks: all scores go to every rank, and rank 0 counts.
  const auto all_windows = engine_->communicator().all_gather_bytes(windows);
  if (engine_->communicator().rank() != 0) return;
  bool may_abstain = false;
  for (std::int64_t i = 0; i < examples_->heldout_records(); ++i)
    may_abstain = may_abstain || examples_->heldout_record(i).impossible;
  data::QaAnswers answers(*examples_, may_abstain);
  std::set<std::int64_t> seen;
  for (const std::string& bytes : all_windows)
    for (const Window& window : windows_in(bytes, examples_->options().sequence)) {
      const data::Sample sample = examples_->heldout(window.index);
      answers.add(sample, window.start, window.end);
      seen.insert(sample.record);
    }
  const auto texts = answers.texts();
  for (const std::int64_t record : seen) note_answer(mine, record, texts[static_cast<std::size_t>(record)]);
}

void ModelTask::evaluate_answers(TaskScores& mine) {
  const std::int64_t held = examples_->heldout_records(), micro = engine_->micro_batch_size(),
                     ranks = engine_->mesh().size("dp"), own = engine_->mesh().rank("dp");
  const bool limited = plan_.options.document().is_set("libzero.data.eval_batches") && plan_.eval_batches > 0;
  const std::int64_t wanted = limited ? std::min(held, plan_.eval_batches * micro * ranks) : held;
  for (std::int64_t first = own * micro; first - own * micro < wanted; first += micro * ranks) {
    std::vector<std::vector<std::int32_t>> prompts;
    for (std::int64_t i = first; i < std::min(first + micro, wanted); ++i)
      prompts.push_back(examples_->heldout_prompt(i));
    const std::size_t count = prompts.size();
    if (count == 0) prompts.push_back(examples_->heldout_prompt(0));
    const auto said = generate(prompts, examples_->options().answer_tokens, {});
    for (std::size_t i = 0; i < count; ++i) note_answer(mine, first + static_cast<std::int64_t>(i), text_of(said[i]));
  }
}

// One object of texts by the records' ids, as SQuAD's script reads it.
void ModelTask::write_predictions() {
  using Json = nlohmann::ordered_json;
  Json mine = Json::array();
  for (const auto& [record, text] : answers_) mine.push_back({record, text});
  const auto replace = Json::error_handler_t::replace;  // a text that ends within a character
  std::map<std::int64_t, std::string> all;
  for (const auto& bytes : engine_->communicator().all_gather_bytes(mine.dump(-1, ' ', false, replace)))
    for (const auto& pair : Json::parse(bytes)) all[pair[0].get<std::int64_t>()] = pair[1].get<std::string>();
  if (engine_->communicator().rank() != 0) return;
  Json predictions = Json::object();
  for (const auto& [record, text] : all) predictions[answer_id(record)] = text;
  write_whole("--predictions", model_plan_.predictions, predictions.dump(1, ' ', false, replace) + "\n");
}

TaskMetrics ModelTask::metrics(const TaskScores& all) const {
  if (model_plan_.task == "classify")
    return {{"accuracy", all.samples > 0 ? all.sums[0] / static_cast<double>(all.samples) : 0}};
  if (model_plan_.task == "qa") {
    const double count = std::max(1.0, all.sums[2]);
    return {{"exact_match", 100 * all.sums[0] / count}, {"f1", 100 * all.sums[1] / count}};
  }
  return {{"perplexity", data::perplexity(all.loss, all.weight)}};
}

std::vector<std::vector<std::int32_t>> ModelTask::generate(const std::vector<std::vector<std::int32_t>>& prompts,
                                                           std::int64_t count, const GeneratePlan& how,
                                                           std::uint64_t seed) {
  // What training ends texts with, and what the model's own configuration does; ids of that are of another tokenizer
  // than that of bytes.
  std::vector<std::int64_t> ends;
  if (const auto& special = tokenizer_->special(); special.end || special.separator)
    ends.push_back(data::end_token(*tokenizer_));
  if (!tokenizer_folder_.empty())
    for (const std::int64_t end : family_->ends()) ends.push_back(end);
  // Where a forward gathers parameters, no rank may end earlier than others.
  const bool all = plan_.options.settings().zero.stage == 3 && engine_->communicator().size() > 1;
  auto said = family_->generate(prompts, {.count = count, .how = how, .seed = seed, .ends = ends, .all_forwards = all});
  for (auto& tokens : said)
    tokens.erase(std::find_first_of(tokens.begin(), tokens.end(), ends.begin(), ends.end()), tokens.end());
  return said;
}

std::string ModelTask::text_of(const std::vector<std::int32_t>& tokens) const {
  std::vector<std::int32_t> known;
  for (const std::int32_t token : tokens)
    if (token >= 0 && token < tokenizer_->vocabulary()) known.push_back(token);
  return tokenizer_->decode(known, /*skip_special=*/true);
}

std::vector<TaskSample> ModelTask::samples() {
  if (plan_.sample == 0 || !family_->generates()) return {};
  const torch::NoGradGuard no_grad;
  module_->eval();
  auto prompts = prompts_;
  if (prompts.empty() && examples_->heldout_records() > 0) {
    prompts.push_back(examples_->heldout_prompt(0));
  } else if (prompts.empty()) {
    const auto text = examples_->heldout_samples() > 0 ? examples_->heldout(0) : examples_->training(0);
    prompts.emplace_back(text.ids.begin(),
                         text.ids.begin() + std::min<std::ptrdiff_t>(kPromptTokens, std::ssize(text.ids)));
  }
  // The same on every rank: equal weights and an equal generator choose the same tokens. One at a time, so that a text
  // does not depend on the others' lengths.
  std::vector<TaskSample> samples;
  for (const auto& prompt : prompts) {
    const auto said =
        generate({prompt}, plan_.sample, model_plan_.generate.value_or(GeneratePlan{}), samples.size() + 1);
    samples.push_back({.prompt = text_of(prompt), .text = text_of(said.front())});
  }
  module_->train();
  return samples;
}

}  // namespace zero::cli
