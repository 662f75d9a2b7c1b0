// The built-in GPT on the bytes of a text, on a mesh of ranks and with experts.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/library.h>

#include "apps/data/corpus.h"
#include "apps/finetune/task.h"
#include "apps/finetune/train.h"
#include "models/gpt.h"
#include "tools/support/gpt_experts.h"
#include "tools/support/gpt_mesh.h"

namespace zero::cli {

class ByteTask final : public TrainTask {
 public:
  // Opens the text. Throws ConfigError. `plan` must outlive the task.
  explicit ByteTask(const TrainPlan& plan);

  Options fit(const Options& options, int world) override;
  std::shared_ptr<torch::nn::Module> build(c10::Device device) override;
  void begin(Engine& engine) override;
  TaskFacts facts() const override;
  void next(std::int64_t samples) override;
  void forward() override;
  void backward() override;
  TaskLosses take_losses() override;
  std::vector<std::int64_t> take_expert_counts() override { return experts_->take(); }
  report::ExpertLoad expert_load(const std::vector<std::int64_t>& sums, std::int64_t step) const override {
    return experts_->load_of(sums, step);
  }
  std::int64_t position() const override { return reader_->position(); }
  std::string reader_state() const override { return reader_->state(); }
  void restore(const std::string& state) override { reader_->restore(state); }
  std::int64_t heldout_samples() const override { return corpus_->heldout_samples(); }
  TaskScores evaluate() override;
  std::vector<TaskSample> samples() override;
  ExportReport export_weights(const std::string& folder, const ExportOptions& options) override;

 private:
  // int64 [samples, sequence + 1], on the model's device.
  at::Tensor batch(const std::vector<const std::uint8_t*>& samples) const;

  const TrainPlan& plan_;
  std::unique_ptr<data::Corpus> corpus_;
  models::Gpt model_{nullptr};
  c10::Device device_ = c10::kCPU;
  Engine* engine_ = nullptr;
  std::optional<GptShare> share_;
  std::optional<ExpertCounter> experts_;
  std::optional<data::Reader> reader_;
  at::Tensor samples_, loss_;  // of the micro-batch
  TaskLosses sums_;
  std::int64_t micro_batches_ = 0;  // in sums_
};

}  // namespace zero::cli
