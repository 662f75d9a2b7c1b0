// Forward and backward of a model of models/ alone, in turns with another library's (script/model-speed): no engine, no
// optimizer.
//
//   model_bench --model NAME [--recipe fp32|bf16] [--batch 1] [--sequence 128] [--steps 3] [--threads 1]
//
// NAME is a GPT-2 or Llama of `zero models`. For each line of standard input it takes --steps steps and answers with
// the milliseconds of processor time of one; for the first line, which warms up, as well.
#include <iostream>
#include <memory>
#include <stdexcept>
#include <utility>
#include <variant>

#include "measure.h"
#include "models/hf_config.h"
#include "models/llama.h"

namespace {

using Loss = std::function<at::Tensor(const at::Tensor& tokens, const at::Tensor& targets)>;

std::pair<std::shared_ptr<torch::nn::Module>, Loss> made(const measure::Flags& flags, std::int64_t& vocabulary) {
  try {
    const auto config = models::hf_preset(flags.text("--model")).config;
    if (const auto* c = std::get_if<models::GptConfig>(&config)) {
      models::Gpt model(*c);
      vocabulary = c->vocabulary;
      return {model.ptr(), [model](const at::Tensor& x, const at::Tensor& y) mutable { return model->forward(x, y); }};
    }
    if (const auto* c = std::get_if<models::LlamaConfig>(&config)) {
      models::Llama model(*c);
      vocabulary = c->vocabulary;
      return {model.ptr(), [model](const at::Tensor& x, const at::Tensor& y) mutable { return model->loss(x, y); }};
    }
  } catch (const std::invalid_argument& fault) {
    flags.wrong(std::string("--model: ") + fault.what());
  }
  flags.wrong("--model: got " + flags.text("--model") + ", expected a GPT-2 or a Llama");
}

}  // namespace

int main(int argc, char** argv) {
  const measure::Flags flags("model_bench", {{"--steps", "3"}}, argc, argv);
  at::set_num_threads(static_cast<int>(flags.number("--threads")));
  torch::manual_seed(1);
  std::int64_t vocabulary = 0;
  const auto [module, loss_of] = made(flags, vocabulary);
  if (flags.bf16()) module->to(torch::kBFloat16);
  const auto length = flags.number("--sequence");
  const at::Tensor tokens = torch::randint(vocabulary, {flags.number("--batch"), length + 1}, torch::kLong);
  const auto step = [&] {
    module->zero_grad();
    at::Tensor loss = loss_of(tokens.narrow(1, 0, length), tokens.narrow(1, 1, length));
    loss.backward();
    return loss;
  };
  for (std::string line; std::getline(std::cin, line);)
    std::cout << measure::timed_turn(c10::kCPU, flags.number("--steps"), step).processor << std::endl;
  return 0;
}
