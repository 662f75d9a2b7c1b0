// Plans compared with engines: for GPTs of many shapes, stages, recipes, worlds, placements and transports, persistent
// bytes and bytes sent per step are equal, and peaks are within 2 %. ZERO_PLAN_TABLE=FILE writes the comparison as a
// table (script/planner-table).
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/activation_checkpoint.h>
#include <zero/library.h>
#include <zero/plan.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "comm/group.h"
#include "config/settings.h"
#include "models/gpt.h"
#include "net/socket.h"
#include "plan/model.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "support/shm_ranks.h"
#include "tools/support/gpt_experts.h"
#include "tools/support/gpt_plan.h"

namespace zero::test::plan_agreement_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

constexpr int kSteps = 3;  // the order of use is known, and buffers have their sizes

const std::string& folder() {
  static const std::string path = temporary_folder();
  return path;
}

struct Shape {
  std::int64_t layers, hidden, heads, sequence, vocabulary;
  bool tied = true;
};

struct Case {
  Shape shape;
  int stage = 0, world = 1;
  std::string recipe = "fp32";
  std::string optimizer = "none", parameters = "none";  // where they rest
  std::int64_t segments = 0, batch = 4, accumulation = 1;
  std::string more;           // further keys of zero_optimization, each with a leading comma
  std::string block, params;  // the same of bf16, and of the optimizer
  std::string rule = "AdamW";
  std::string keys;                  // the same of the file
  std::string checkpoints;           // and of activation_checkpointing
  bool experts = false;              // in `keys`
  std::string transport = "thread";  // "shm": processes of one host; "gloo": over TCP, as between hosts

  std::string name() const {
    std::ostringstream out;
    out << "L" << shape.layers << " h" << shape.hidden << " s" << shape.sequence << " V" << shape.vocabulary
        << (shape.tied ? "" : " untied") << ", stage " << stage << ", " << recipe << ", " << world
        << (transport == "shm"    ? " processes"
            : transport == "gloo" ? " ranks over TCP"
            : world == 1          ? " rank"
                                  : " ranks");
    if (rule != "AdamW") out << ", " << rule;
    if (optimizer != "none") out << ", optimizer " << optimizer;
    if (parameters != "none") out << ", parameters " << parameters;
    if (segments > 0) out << ", " << segments << " segments";
    if (accumulation > 1) out << ", " << accumulation << " micro-batches";
    auto text = out.str() + more + block + params + checkpoints + keys;
    for (auto at = text.find(folder()); at != std::string::npos; at = text.find(folder()))
      text.replace(at, folder().size(), "/tmp");
    return text;
  }
};

Options options_of(const Case& c) {
  std::ostringstream out;
  const auto place = [&](const char* key, const std::string& device, const char* rest) {
    if (device != "none")
      out << ", \"" << key << R"(": {"device": ")" << device << R"(", "nvme_path": ")" << folder() << "\"" << rest
          << "}";
  };
  out << R"({"train_micro_batch_size_per_gpu": )" << c.batch << R"(, "gradient_accumulation_steps": )" << c.accumulation
      << R"(, "optimizer": {"type": ")" << c.rule << R"(", "params": {"lr": 0.001)" << c.params
      << R"(}}, "zero_optimization": {"stage": )" << c.stage;
  place("offload_optimizer", c.optimizer, "");
  place("offload_param", c.parameters, R"(, "max_in_cpu": 0)");
  out << c.more << "}";
  if (c.recipe == "bf16") out << R"(, "bf16": {"enabled": true)" << c.block << "}";
  if (c.recipe == "fp16") out << R"(, "fp16": {"enabled": true, "initial_scale_power": 8})";
  if (c.segments > 0)
    out << R"(, "activation_checkpointing": {"number_checkpoints": )" << c.segments << c.checkpoints << "}";
  out << c.keys;
  out << "}";
  return Options::from_json(out.str());
}

models::Gpt make_model(const Case& c) {
  const auto& shape = c.shape;
  static std::mutex mutex;  // of libtorch's generator
  std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(1);
  models::GptConfig config;
  config.layers = shape.layers, config.hidden = shape.hidden, config.heads = shape.heads;
  config.sequence = shape.sequence, config.vocabulary = shape.vocabulary, config.tied_output = shape.tied;
  cli::add_experts(config, options_of(c).settings().model.experts);
  return models::Gpt(config);
}

// Engine::memory() after the last step, as it goes from a process to the test.
struct Measured {
  std::uint64_t current[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::uint64_t peak[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::uint64_t peak_of_all[MemoryReport::kTiers] = {};
  std::uint64_t sent = 0;  // in the last step
};

constexpr Tier kTiers[] = {Tier::Device, Tier::Host, Tier::File};

Measured train(const Case& c, const Comm& comm) {
  at::set_num_threads(1);
  // A plan counts tensors. What oneDNN allocates inside a 16-bit matrix product depends on the processor: for these
  // models, 0.1 MB where it multiplies such numbers, 3 MB where it converts them, nothing where libtorch does not use
  // it. With segments, the peak of activations is inside of such a product. libtorch's own product is exact, but slow.
  at::globalContext().setUserEnabledMkldnn(c.segments == 0);
  auto model = make_model(c);
  if (c.segments > 0)
    model->run_layers_by(c.segments, [](const models::GptImpl::Part& part, const at::Tensor& x) {
      return activation_checkpoint(part, x);
    });
  const auto tokens = at::arange(c.batch * c.shape.sequence).remainder(c.shape.vocabulary).view({c.batch, -1});
  Engine engine(model, options_of(c), comm);
  for (int step = 0; step < kSteps; ++step) {
    comm->reset_stats();
    for (std::int64_t k = 0; k < c.accumulation; ++k) {
      auto loss = model->forward(tokens, tokens);
      engine.backward(loss);
      loss = at::Tensor();
      engine.step();
    }
  }
  const auto memory = engine.memory();
  Measured result;
  for (const auto tier : kTiers) {
    const auto t = MemoryReport::index(tier);
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      result.current[t][p] = memory.current(tier, static_cast<Purpose>(p));
      result.peak[t][p] = memory.peak(tier, static_cast<Purpose>(p));
    }
    result.peak_of_all[t] = memory.peak(tier);
  }
  result.sent = comm->stats().bytes_sent();
  comm->barrier();
  return result;
}

Measured on_threads(const Case& c) {
  Measured result;
  std::mutex mutex;
  run_ranks(c.world, {}, [&](Comm comm) {
    const auto run = train(c, comm);
    std::lock_guard<std::mutex> lock(mutex);
    if (comm->rank() == 0) result = run;
  });
  return result;
}

int free_port() {
  net::MeetingPoint point{"", "127.0.0.1", 0};
  net::listen_at(point);
  return point.port;
}

// Before anything of this process has used libtorch.
Measured on_processes(const Case& c) {
  const auto file = folder() + "/measured";
  const auto run_id = fresh_run_id();
  const int port = c.transport == "gloo" ? free_port() : 0;
  const auto ends = fork_ranks(c.world, [&](int rank) {
    at::set_num_threads(1);
    auto identity = identity_of(run_id, rank, c.world);
    if (port != 0) {
      identity.local_rank = 0, identity.local_size = 1;
      identity.master_addr = "127.0.0.1", identity.master_port = port;
    }
    const auto limit = std::chrono::seconds(60);
    const auto comm =
        comm::make_communicator(port != 0 ? comm::make_gloo(identity, limit) : comm::make_shm(identity, limit));
    const auto run = train(c, comm);
    if (rank == 0) std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(&run), sizeof run);
  });
  if (const auto errors = errors_of(ends); !errors.empty()) throw std::runtime_error(errors);
  Measured run;
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(&run), sizeof run);
  std::filesystem::remove(file);
  return run;
}

Plan planned(const Case& c) {
  PlanModel model;
  model.layers = c.shape.layers, model.hidden = c.shape.hidden, model.heads = c.shape.heads;
  model.sequence = c.shape.sequence, model.vocabulary = c.shape.vocabulary, model.tied = c.shape.tied;
  model.experts = planning::experts_of(options_of(c).settings().model.experts);
  PlanMachine machine;
  machine.gpu = false;
  (c.transport == "gloo" ? machine.hosts : machine.ranks_per_host) = c.world;
  machine.shared_memory = c.transport == "shm";
  return plan(cli::with_gpt_pass(model), options_of(c), machine);
}

const Shape kShapes[] = {{2, 128, 4, 64, 512}, {4, 96, 4, 128, 256}, {3, 160, 5, 64, 384, false}, {6, 128, 8, 64, 256}};

constexpr const char* kNormsInFp32 = R"(, "libzero": {"keep_fp32": "*norm*"})";

std::vector<Case> thread_cases() {
  std::vector<Case> all;
  for (const int stage : {1, 3}) {
    auto& norms = all.emplace_back();
    norms.shape = kShapes[0], norms.stage = stage, norms.world = 2, norms.recipe = "bf16", norms.keys = kNormsInFp32;
  }
  int k = 0;
  // Each stage and recipe at two of the worlds 1 to 4, each shape, placement and segmentation at several of these.
  // OfProcesses has further worlds of fp32 and bf16.
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* recipe : {"fp32", "bf16", "fp16"})
      for (const int first = 1 + k / 2 % 2; const int world : {first, first + 2}) {
        Case c;
        c.shape = kShapes[(k + k / 4) % 4], c.stage = stage, c.world = world, c.recipe = recipe;
        if (stage >= 1 && k % 3 == 1) c.optimizer = k % 2 == 0 ? "cpu" : "nvme";
        if (stage == 3 && k % 4 >= 2) c.parameters = k % 2 == 0 ? "cpu" : "nvme";
        // With 16 samples, no tensor that a segment allocates again has a gradient's size.
        if (k % 5 == 3) c.segments = k % 2 == 0 ? c.shape.layers : 2, c.batch = 16;
        if (k % 7 == 4) c.accumulation = 2;
        ++k;
        all.push_back(c);
      }
  // Other options with an effect.
  const auto add = [&](std::size_t shape, int stage, int world, const char* recipe, const char* more) -> Case& {
    Case c;
    c.shape = kShapes[shape], c.stage = stage, c.world = world, c.recipe = recipe, c.more = more;
    return all.emplace_back(c);
  };
  add(1, 2, 2, "bf16", R"(, "delayed_update": {"enabled": true})").optimizer = "cpu";
  add(1, 2, 3, "fp32", R"(, "reduce_bucket_size": 50000)");
  add(1, 3, 2, "fp32", R"(, "stage3_param_persistence_threshold": 1000)");
  add(3, 3, 2, "bf16", R"(, "stage3_max_reuse_distance": 1000000000)");
  add(3, 3, 2, "bf16", R"(, "stage3_prefetch_bucket_size": 0)");
  auto& tiles = add(0, 3, 2, "fp32", R"(, "sub_group_size": 20000)");
  tiles.optimizer = tiles.parameters = "nvme";
  // Checkpoints on other tiers.
  for (const int stage : {1, 3}) {
    auto& host = add(3, stage, 2, "fp32", "");
    host.segments = 6, host.batch = 16, host.checkpoints = R"(, "cpu_checkpointing": true)";
    auto& file = add(3, stage, 1, "fp32", "");
    file.segments = 3, file.batch = 16;
    file.keys = R"(, "libzero": {"activation_file_path": ")" + folder() + "\"}";
  }
  // Budgets, which move states without an explicit tier.
  const auto budget = [&](std::size_t shape, int stage, int world, const char* recipe, const std::string& memory) {
    add(shape, stage, world, recipe, "").keys = R"(, "memory": {)" + memory + R"(, "nvme_path": ")" + folder() + "\"}";
  };
  budget(0, 2, 2, "bf16", R"("device": 9500000, "activations": 5800000)");
  budget(0, 3, 2, "fp32", R"("device": 11900000, "activations": 7000000)");
  budget(0, 3, 2, "bf16", R"("device": 8000000, "activations": 5000000, "host": 3400000, "file": 100000000)");
  return all;
}

// Masters and optimizer states of fewer bits.
std::vector<Case> narrow_cases() {
  std::vector<Case> all;
  for (const char* params : {R"(, "state_bits": 8)", R"(, "state_bits": 16)"})
    for (const char* block : {"", R"(, "bf16_master_weights_and_grads": true)"})
      for (const char* optimizer : {"none", "nvme"}) {
        auto& c = all.emplace_back();
        c.shape = kShapes[all.size() % 4], c.stage = *block == '\0' ? 3 : 1, c.world = 2, c.recipe = "bf16";
        c.params = params, c.block = block, c.optimizer = optimizer;
      }
  return all;
}

// Matrices that owners update whole: their states, and what ranks exchange.
std::vector<Case> muon_cases(const char* transport) {
  std::vector<Case> all;
  for (int stage = 0; stage <= 3; ++stage)
    for (const int world : {2, 3}) {
      auto& c = all.emplace_back();
      c.shape = kShapes[all.size() % 4], c.stage = stage, c.world = world, c.rule = "Muon", c.transport = transport;
      if (stage % 2 == 1) c.recipe = "bf16";
      if (stage >= 1 && world == 3) c.optimizer = "cpu";
      if (stage == 2) c.accumulation = 2;
    }
  return all;
}

// As `zero run` starts ranks: they read each other's memory on one host, and send integers over a network.
std::vector<Case> process_cases() {
  std::vector<Case> all;
  int k = 0;
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* recipe : {"fp32", "bf16"})
      for (int world = 2; world <= 3; ++world) {
        Case c;
        c.shape = kShapes[(k + k / 4) % 4], c.stage = stage, c.world = world, c.recipe = recipe, c.transport = "shm";
        if (stage >= 1 && k % 3 == 1) c.optimizer = k % 2 == 0 ? "cpu" : "nvme";
        if (stage == 3 && k % 4 >= 2) c.parameters = k % 2 == 0 ? "cpu" : "nvme";
        if (k % 5 == 3) c.segments = 2, c.batch = 16;
        if (k % 7 == 4) c.accumulation = 2;
        ++k;
        all.push_back(c);
      }
  const auto add = [&](std::size_t shape, int stage, int world, const char* transport, const char* more) -> Case& {
    Case c;
    c.shape = kShapes[shape], c.stage = stage, c.world = world, c.transport = transport, c.more = more;
    return all.emplace_back(c);
  };
  add(0, 2, 2, "shm", "").keys = R"(, "communication_data_type": "bf16")";
  for (const int stage : {0, 3}) {
    auto& norms = add(0, stage, 2, "shm", "");
    norms.recipe = "bf16", norms.keys = kNormsInFp32;
  }
  add(1, 3, 2, "shm", R"(, "stage3_max_reuse_distance": 1000000000)");
  auto& late = add(1, 2, 2, "shm", R"(, "delayed_update": {"enabled": true})");
  late.recipe = "bf16", late.optimizer = "cpu";
  for (int stage = 0; stage <= 3; ++stage) add(0, stage, 2, "gloo", "");
  add(1, 3, 2, "gloo", R"(, "zero_quantized_weights": true)");
  add(1, 3, 3, "gloo", R"(, "zero_quantized_weights": true)").recipe = "bf16";
  // Tensor parallelism, without and with data-parallel ranks.
  for (int stage = 0; stage <= 3; ++stage)
    for (const int world : {2, 4}) {
      auto& mesh = add(stage % 2 == 0 ? 0 : 3, stage, world, "shm", "");
      mesh.keys = R"(, "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})";
      if (stage % 2 == 1) mesh.recipe = "bf16";
      if (stage == 1 || (stage == 2 && world == 4)) mesh.segments = mesh.shape.layers, mesh.batch = 16;
      if (stage == 2 && world == 4) mesh.checkpoints = R"(, "partition_activations": true)";
    }
  return all;
}

std::vector<Case> expert_cases() {
  std::vector<Case> all;
  // Experts: all on every rank, divided over two, and over all. Each has more tokens than it takes, so that it is known
  // how many rows are sent.
  for (int stage = 0; stage <= 3; ++stage)
    for (const int ep : {1, 2, 4})
      for (const bool residual : {false, true}) {
        Case moe;
        moe.shape = kShapes[1], moe.stage = stage, moe.world = 4;
        moe.transport = ep == 2 && residual ? "gloo" : "shm";
        moe.experts = true;
        if (stage % 2 == 1) moe.recipe = "bf16";
        if (stage == 2) moe.accumulation = 2;
        if (stage == 3 && residual) moe.segments = 2;
        if (stage == 1 && residual) moe.optimizer = "cpu";
        moe.keys = R"(, "libzero": {"model": {"experts": {"num_experts": 4, "k": 2, "capacity_factor": 0.25,
          "min_capacity": 0, "ep_size": )" +
                   std::to_string(ep) + (residual ? R"(, "use_residual": true}}})" : "}}}");
        all.push_back(moe);
      }
  return all;
}

double difference(std::uint64_t planned, std::uint64_t measured) {
  if (planned == measured) return 0;
  return measured == 0 ? 1 : static_cast<double>(planned) / static_cast<double>(measured) - 1;
}

// Of all tests so far, in order.
std::vector<std::string>& rows() {
  static std::vector<std::string> all;
  return all;
}

void write_table() {
  const char* path = std::getenv("ZERO_PLAN_TABLE");
  if (path == nullptr) return;
  std::ofstream out(path);
  out << "| GPT | at rest, planned = measured | device peak, planned | measured | difference "
         "|\n|---|---|---|---|---|\n";
  for (const auto& row : rows()) out << row << "\n";
}

// Processes of one host sum gradients in place, and a group that is summed before the next is ready frees its memory
// immediately: from stage 2 on one group, at stage 1 every group whose sum is copied to the host. The plan assumes that
// none is freed early, so the measured value may be lower by that many bytes.
std::uint64_t early(const Case& c) {
  if (c.transport != "shm" || c.stage == 0 || (c.stage == 1 && c.optimizer == "none")) return 0;
  const auto& s = c.shape;
  const auto layer = 12 * s.hidden * s.hidden + 13 * s.hidden;  // with tensor parallelism at most that
  const auto root = ((s.tied ? 1 : 2) * s.vocabulary + s.sequence + 2) * s.hidden;
  const auto numel = c.stage == 1 ? root + s.layers * layer : std::max(layer, root);
  return static_cast<std::uint64_t>(numel * (c.recipe == "fp32" ? 4 : 2) + 64 * 12 * s.layers);
}

void compare(const Case& c, const Measured& engine) {
  constexpr double kPeak = 0.02;
  const auto expect_near = [&](std::uint64_t planned, std::uint64_t measured, std::uint64_t less) {
    if (c.experts) return;  // how many rows an expert computes depends on the tokens
    if (measured < planned) measured += std::min(less, planned - measured);
    EXPECT_LE(std::abs(difference(planned, measured)), kPeak) << "planned " << planned << ", measured " << measured;
  };
  Plan whole;
  ASSERT_NO_THROW(whole = planned(c));
  const auto& forecast = whole.memory;
  EXPECT_EQ(whole.traffic.sent(), engine.sent) << "bytes sent in a step";
  EXPECT_TRUE(whole.fits) << whole.refusal;
  std::uint64_t rest = 0;
  for (const auto tier : kTiers) {
    const auto t = MemoryReport::index(tier);
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      const auto purpose = static_cast<Purpose>(p);
      const auto where = std::string(MemoryReport::name(tier)) + ", " + MemoryReport::name(purpose);
      const bool passing =
          tier == Tier::Device && purpose == (c.stage == 1 ? Purpose::Gradients : Purpose::ReduceBuffers);
      const auto less = passing ? early(c) : 0;
      SCOPED_TRACE(where);
      // Activations of a gradient's size reuse its memory, and those of experts depend on the tokens.
      const bool reused = purpose == Purpose::ReduceBuffers || (purpose == Purpose::Gradients && c.stage <= 1);
      const bool known = less == 0 && !(c.experts && reused);
      if (purpose != Purpose::Activations && known) {  // nothing of them rests
        EXPECT_EQ(forecast.current(tier, purpose), engine.current[t][p]);
        rest += engine.current[t][p];
      }
      expect_near(forecast.peak(tier, purpose), engine.peak[t][p], less);
    }
    SCOPED_TRACE(MemoryReport::name(tier));
    expect_near(forecast.peak(tier), engine.peak_of_all[t], tier == Tier::Device ? early(c) : 0);
  }
  const auto measured = engine.peak_of_all[MemoryReport::index(Tier::Device)];
  std::ostringstream row;
  row << "| " << c.name() << " | " << rest << " | " << forecast.peak(Tier::Device) << " | " << measured << " | "
      << std::showpos << std::fixed;
  row.precision(2);
  row << 100 * difference(forecast.peak(Tier::Device), measured) << " % |";
  rows().push_back(row.str());
}

void compare_processes(const std::vector<Case>& all) {
  OneIn part(23);
  for (const auto& c : all) {
    if (!part.take()) continue;
    SCOPED_TRACE(c.name());
    Measured run;
    ASSERT_NO_THROW(run = on_processes(c));
    compare(c, run);
  }
}

// The first two run first, because they fork.
TEST(PlanAgreement, OfProcesses) { compare_processes(process_cases()); }

TEST(PlanAgreement, OfMuonInProcesses) {
  for (const char* transport : {"shm", "gloo"}) compare_processes(muon_cases(transport));
}

TEST(PlanAgreement, OfExperts) { compare_processes(expert_cases()); }

TEST(PlanAgreement, OfThreads) {
  const auto all = thread_cases();
  ASSERT_GE(all.size(), 30u);
  OneIn part(37);
  for (const auto& c : all) {
    if (!part.take()) continue;
    SCOPED_TRACE(c.name());
    Measured run;
    ASSERT_NO_THROW(run = on_threads(c));
    compare(c, run);
  }
  auto others = narrow_cases();
  for (auto& c : muon_cases("thread")) others.push_back(std::move(c));
  for (const auto& c : others) {
    SCOPED_TRACE(c.name());
    Measured run;
    ASSERT_NO_THROW(run = on_threads(c));
    compare(c, run);
  }
  write_table();
}

}  // namespace
}  // namespace zero::test::plan_agreement_test
