// A process that saves and loads checkpoints on request, for tests/fault/checkpoint_faults.py, which kills it. Started
// with key=value: stage (0), optimizer and param (device of these states: none, cpu, nvme), nvme (a folder), background
// (0 or 1: saves). Prints "ready PID"; then reads lines and answers each with one:
//   save ROOT N   all states become pattern N, and are saved as step-N    "saved N" or "failed CODE TEXT"
//   load ROOT     the newest checkpoint                       "loaded N", "wrong TEXT" or "failed CODE TEXT"
//   export OUT N  all masters become pattern N, and are exported to OUT  "exported N" or "failed CODE TEXT"
//   import OUT N  an export                                   "loaded N", "wrong TEXT" or "failed CODE TEXT"
#include <ATen/Parallel.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace {

struct Layers : torch::nn::Module {
  Layers() {
    for (int i = 0; i < 4; ++i) register_module("layer" + std::to_string(i), torch::nn::Linear(256, 256));
  }
};

constexpr const char* kStates[] = {"master", "exp_avg", "exp_avg_sq"};

// Elements N + k / 1024: exact, different in each checkpoint, and never shifted unnoticed.
at::Tensor pattern(const at::Tensor& like, int n, int state) {
  return ((at::arange(like.numel(), at::kFloat) + 31 * state).remainder(1000) / 1024 + n).view(like.sizes());
}

class Subject {
 public:
  explicit Subject(std::map<std::string, std::string> keys)
      : module_(std::make_shared<Layers>()),
        engine_(module_, zero::Options::from_json(json_of(keys)), zero::Communicator::local()) {}

  std::string save(const std::string& root, int n) {
    set(n);
    engine_.save_checkpoint(root, "step-" + std::to_string(n));
    engine_.finish_checkpoint();
    return "saved " + std::to_string(n);
  }

  std::string load(const std::string& root) {
    const auto tag = engine_.load_checkpoint(root);
    return compare(std::stoi(tag.substr(tag.find('-') + 1)), 3);
  }

  std::string export_to(const std::string& out, int n) {
    set(n);
    engine_.export_weights(out);
    return "exported " + std::to_string(n);
  }

  std::string import_from(const std::string& out, int n) {
    set(0);
    engine_.import_weights(out);
    return compare(n, 1);
  }

 private:
  void set(int n) {
    for (const auto& item : module_->named_parameters())
      for (int state = 0; state < 3; ++state)
        engine_.set_parameter_state(item.key(), kStates[state], pattern(item.value(), n, state));
  }

  // The first `states` of each parameter.
  std::string compare(int n, int states) {
    for (const auto& item : module_->named_parameters())
      for (int state = 0; state < states; ++state)
        if (!at::equal(engine_.parameter_state(item.key(), kStates[state]), pattern(item.value(), n, state)))
          return "wrong " + item.key() + " " + kStates[state] + " of step " + std::to_string(n);
    return "loaded " + std::to_string(n);
  }

  static std::string json_of(std::map<std::string, std::string>& keys) {
    std::string zero = "\"stage\": " + (keys["stage"].empty() ? "0" : keys["stage"]);
    for (const char* what : {"optimizer", "param"})
      if (const auto& device = keys[what]; !device.empty() && device != "none")
        zero += std::string(", \"offload_") + what + "\": {\"device\": \"" + device + "\", \"nvme_path\": \"" +
                keys["nvme"] + "\"}";
    return R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},)"
           R"("checkpoint": {"writer": {"decoupled": )" +
           std::string(keys["background"] == "1" ? "true" : "false") + R"(}}, "zero_optimization": {)" + zero + "}}";
  }

  std::shared_ptr<Layers> module_;
  zero::Engine engine_;
};

std::string answer(Subject& subject, const std::string& line) {
  std::istringstream words(line);
  std::string what, root;
  int n = 0;
  words >> what >> root >> n;
  try {
    return what == "save"     ? subject.save(root, n)
           : what == "export" ? subject.export_to(root, n)
           : what == "import" ? subject.import_from(root, n)
                              : subject.load(root);
  } catch (const zero::Error& e) {
    std::string text = e.what();
    std::replace(text.begin(), text.end(), '\n', ' ');
    return "failed " + std::to_string(static_cast<int>(e.code())) + " " + text;
  }
}

}  // namespace

int main(int count, char** words) {
  std::map<std::string, std::string> keys;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    keys[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  at::set_num_threads(1);
  Subject subject(keys);
  std::cout << "ready " << ::getpid() << std::endl;
  for (std::string line; std::getline(std::cin, line);) std::cout << answer(subject, line) << std::endl;
}
