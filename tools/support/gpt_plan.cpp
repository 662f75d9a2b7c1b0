#include "tools/support/gpt_plan.h"

#include <cmath>

#include "models/gpt_pass.h"

namespace zero::cli {
namespace {

class PassOn final : public models::PassListener {
 public:
  explicit PassOn(PlanPass& pass) : pass_(pass) {}
  void allocated(std::int64_t tensor, std::int64_t bytes) override { pass_.allocate(tensor, bytes); }
  void released(std::int64_t tensor) override { pass_.release(tensor); }
  void used(std::size_t first, std::size_t count) override { pass_.use(first, count); }
  void segment_begins(std::int64_t input) override { pass_.begin_segment(input); }
  void segment_ends() override { pass_.end_segment(); }
  void segment_runs_again(std::int64_t input) override { pass_.rerun_segment(input); }
  void backward_begins() override { pass_.begin_backward(); }
  void gradient(std::size_t parameter, std::int64_t tensor) override { pass_.gradient(parameter, tensor); }
  void backward_ends() override { pass_.end_backward(); }

 private:
  PlanPass& pass_;
};

void gpt_pass(const PlanModel& model, const PlanBatch& batch, PlanPass& pass) {
  const models::GptConfig config{.layers = model.layers,
                                 .hidden = model.hidden,
                                 .heads = model.heads,
                                 .sequence = model.sequence,
                                 .vocabulary = model.vocabulary,
                                 .tied_output = model.tied};
  PassOn listener(pass);
  const auto part = [](double fraction, std::int64_t all) { return std::llround(fraction * static_cast<double>(all)); };
  models::describe_pass(config,
                        {.samples = batch.samples,
                         .segments = batch.segments,
                         .element = batch.element,
                         .gpu = batch.gpu,
                         .tokens = batch.tokens,
                         .heads = part(batch.heads, model.heads),
                         .inner = part(batch.inner, 4 * model.hidden),
                         .vocabulary = part(batch.vocabulary, model.vocabulary),
                         .gathered_logits = batch.gathered_logits,
                         .fp32 = batch.fp32},
                        listener);
}

}  // namespace

PlanModel with_gpt_pass(PlanModel model) {
  if (model.kind == PlanModel::Kind::Gpt && model.mlp_width() == 4 * model.hidden && model.experts.count == 0)
    model.pass = gpt_pass;
  return model;
}

}  // namespace zero::cli
