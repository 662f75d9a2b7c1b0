// `zero train --model`: a model of a folder or of a name on records, with or without low-rank adapters. What the models
// are is in model_family.h, what samples are in apps/data/examples.h.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/finetune/model_family.h"
#include "apps/finetune/task.h"
#include "apps/finetune/train.h"
#include "models/lora.h"

namespace zero::cli {

class ModelTask final : public TrainTask {
 public:
  // Reads configuration, tokenizer and data. Throws ConfigError, and IoError for adapters that are damaged. `plan` must
  // outlive the task; its initial weights become those of the model's folder, unless it names others.
  explicit ModelTask(TrainPlan& plan);

  Options fit(const Options& options, int world) override;
  std::shared_ptr<torch::nn::Module> build(c10::Device device) override;
  void begin(Engine& engine) override;
  void took(const ImportReport& report) override;
  std::vector<std::string> take_initial_weights() override;
  TaskFacts facts() const override;
  void next(std::int64_t samples) override;
  void forward() override;
  void backward() override;
  TaskLosses take_losses() override;
  std::int64_t position() const override { return reader_->position(); }
  std::string reader_state() const override { return reader_->state(); }
  void restore(const std::string& state) override { reader_->restore(state); }
  std::int64_t heldout_samples() const override { return examples_->heldout_samples(); }
  TaskScores evaluate() override;
  TaskMetrics metrics(const TaskScores& all) const override;
  std::vector<TaskSample> samples() override;
  ExportReport export_weights(const std::string& folder, const ExportOptions& options) override;

 private:
  void read_tokenizer();
  void read_data();
  void read_weights(TrainPlan& plan);
  void read_adapters();
  // Layers whose names in files end with a target.
  bool is_target(const std::string& path) const;
  bool stays_whole(const std::string& parameter) const;
  void require_layers() const;  // throws ConfigError for targets without one
  std::vector<std::string> adapter_parameters() const;
  bool by_generation() const;  // answers are generated, not chosen
  void evaluate_samples(TaskScores& mine);
  void evaluate_answers(TaskScores& mine);
  // `seed`: of the tokens that are drawn.
  std::vector<std::vector<std::int32_t>> generate(const std::vector<std::vector<std::int32_t>>& prompts,
                                                  std::int64_t count, const GeneratePlan& how, std::uint64_t seed = 1);
  std::string text_of(const std::vector<std::int32_t>& tokens) const;
  void read_prompts();
  void require_ids() const;
  std::string answer_id(std::int64_t record) const;  // of a record without one: "#17"
  void note_answer(TaskScores& scores, std::int64_t record, const std::string& text);
  // [collective] The answers of all ranks, by rank 0.
  void write_predictions();
  // Sets ExportOptions::change, so that the weights that are written have the adapters in them.
  void merge_adapters(ExportOptions& options);

  const TrainPlan& plan_;
  const ModelPlan& model_plan_;
  std::unique_ptr<ModelFamily> family_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::string tokenizer_folder_;  // empty: bytes
  std::unique_ptr<data::Examples> examples_;
  std::optional<LoraPlan> lora_plan_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<models::Lora> lora_;
  std::int64_t segments_ = 0;
  c10::Device device_ = c10::kCPU;
  Engine* engine_ = nullptr;
  std::optional<data::ExampleReader> reader_;
  std::int64_t parameters_ = 0, trained_ = 0;
  std::vector<std::vector<std::int32_t>> prompts_;  // of --prompt
  std::vector<std::string> warnings_;
  std::map<std::int64_t, std::string> answers_;  // this rank's, by held-out record, of the last evaluation
  Batch batch_;
  at::Tensor loss_;  // of the micro-batch
  TaskLosses sums_;
};

}  // namespace zero::cli
