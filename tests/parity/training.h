// Training of a problem with and without the engine, for comparison by the parity tests.
#pragma once
#include <torch/types.h>
#include <zero/library.h>

#include <map>
#include <string>
#include <vector>

#include "parity/problems.h"

namespace zero::test {

struct Outcome {
  std::vector<double> losses;  // mean over ranks and micro-batches, one a step
  std::vector<double> norms;
  std::string hash;
  std::map<std::string, at::Tensor> masters;
  std::vector<CommStats> stats;  // of the last step, by rank
  int overflows = 0;
};

struct Training {
  std::string problem = "gpt";
  int world = 2, stage = 3, steps = 20, accumulation = 1;
  std::string recipe = "fp32";  // fp32, bf16, fp16
  double clip = 0;
  bool prefetch = true;
  std::string optimizer = R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.05}})";
  at::Device device = at::kCPU;
  std::string extra{};  // further top-level keys, each with a leading comma
  std::string zero{};   // the same, of zero_optimization
  std::string block{};  // the same, of bf16 or fp16
};

std::string json_of(const Training& setup);
at::ScalarType dtype_of(const Training& setup);

// One rank's training; called with a communicator of the setup's world.
Outcome train_rank(const Training& setup, const std::shared_ptr<Communicator>& comm);
// Ranks as threads; rank 0's Outcome with all ranks' stats.
Outcome train_threads(const Training& setup, const ThreadFaults& faults = {});

// A single-process loop without libzero: one replica per rank, gradients summed in rank order in
// fp32, clipped, libtorch's fused AdamW. Data-parallel training must give the same result.
Outcome train_plain(const Training& setup);

// The largest |a-b| / (|b| + floor) over all parameters.
double distance(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                double floor = 1e-3);
bool equal_bits(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                std::string* first = nullptr);

}  // namespace zero::test
