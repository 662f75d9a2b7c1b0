// Trains a Llama further that transformers saved, and writes it for transformers:
//   zero run -n 2 llama FOLDER OUT
#include <torch/types.h>
#include <zero/library.h>

#include <cstdio>
#include <fstream>

#include "models/hf_config.h"
#include "models/llama.h"

int main(int count, char** words) {
  if (count != 3) return std::fprintf(stderr, "usage: llama FOLDER OUT\n"), 2;
  auto comm = zero::Communicator::from_env();
  const models::HfConfig described = models::read_hf_config(words[1]);
  const auto& config = std::get<models::LlamaConfig>(described.config);
  auto model = zero::build([&] { return models::Llama(config); });
  zero::Engine engine(model, zero::Options::build().stage(3).bf16().adamw({.lr = 0.01}).train_micro_batch_size(8),
                      comm);
  zero::ImportOptions import;
  import.names = "llama";
  engine.load_weights(words[1], import);
  const std::int64_t time = std::min<std::int64_t>(config.sequence, 64);
  torch::manual_seed(1 + comm->rank());
  for (int step = 1; step <= 100; ++step) {
    // Samples count from a random token on. The target of each token is the next one.
    const at::Tensor tokens = (torch::arange(time + 1) + torch::randint(config.vocabulary, {8, 1})) % config.vocabulary;
    const at::Tensor loss = model->loss(tokens.narrow(1, 0, time), tokens.narrow(1, 1, time));
    engine.backward(loss);
    engine.step();
    if (step % 20 == 0 && comm->rank() == 0) std::printf("step %d loss %.4f\n", step, loss.item<double>());
  }
  zero::ExportOptions out;
  out.dtype = "bf16";
  out.names = "llama";
  engine.export_weights(words[2], out);
  const at::Tensor text = model->generate(torch::zeros({1, 1}, torch::kLong), 8, {.temperature = 0});  // on all ranks
  if (comm->rank() != 0) return 0;
  std::ofstream(std::string(words[2]) + "/config.json") << models::hf_config_text(described, "bfloat16");
  for (const std::int64_t token :
       std::vector<std::int64_t>(text.data_ptr<std::int64_t>(), text.data_ptr<std::int64_t>() + 9))
    std::printf("%ld ", token);
  std::printf("\n");
}
