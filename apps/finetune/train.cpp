// `zero train`, from the command line to the end of the run: parse, plan, ranks, model, engine, loop. An error before
// the loop that all ranks share is printed once.
#include <torch/types.h>
#include <zero/library.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "apps/finetune/byte_task.h"
#include "apps/finetune/model_task.h"
#include "apps/finetune/train.h"
#include "apps/finetune/train_report.h"
#include "apps/finetune/train_run.h"
#include "config/batch.h"
#include "config/settings.h"
#include "observe/status_page.h"
#include "tools/report/text/text.h"
#include "tools/support/rank_failures.h"

namespace zero::cli {
namespace {

// libzero.transport and libzero.timeout_s, unless the environment sets them.
void prepare_environment(const config::Settings& settings, bool on_gpu) {
  if (settings.transport != "auto") ::setenv("ZERO_TRANSPORT", settings.transport.c_str(), 0);
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.17g", settings.timeout_s);
  ::setenv("ZERO_TIMEOUT_S", seconds, 0);
  ::unsetenv("ZERO_TRACE");  // part of the plan, like --trace
  // Training on the CPU must not select nccl because of a GPU.
  const char* asked = std::getenv("ZERO_TRANSPORT");
  if (!on_gpu && (!asked || std::string(asked) != "nccl")) ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
}

// The configuration's log level applies if --log-level, -q, -v and ZERO_LOG_LEVEL are not given.
void take_log_level(Global& global, const config::Settings& settings) {
  if (!global.log_level.empty() || global.quiet || global.verbose || std::getenv("ZERO_LOG_LEVEL")) return;
  global.log_level = settings.log_level.value_or("");
  if (global.log_level == "critical") global.log_level = "error";
  install_log_sink("train", global);
}

const char* name(config::Precision precision) {
  return precision == config::Precision::Bf16 ? "bf16" : precision == config::Precision::Fp16 ? "fp16" : "fp32";
}

c10::Device device_of(const TrainPlan& plan, const Communicator& comm) {
  if (!plan.on_gpu) return c10::kCPU;
  if (const auto why = why_no_gpu(comm); !why.empty())
    throw ConfigError("[--device] got cuda, but " + why + ". Hint: leave --device out, or see `zero doctor`.");
  return default_device(comm);
}

void introduce(TrainReport& report, const TrainPlan& plan, const TaskFacts& facts, const Engine& engine,
               c10::Device device) {
  const config::Settings& s = plan.options.settings();
  report.note(LogLevel::Info, "stage " + std::to_string(s.zero.stage) + ", " + name(s.precision) + ", seed " +
                                  std::to_string(s.seed) + (device.is_cpu() ? ", on CPUs" : ", on GPUs"));
  for (const auto& line : facts.model) report.note(LogLevel::Info, line);
  report.note(LogLevel::Info, facts.data + "; a step takes " + std::to_string(engine.micro_batch_size()) + " x " +
                                  std::to_string(engine.accumulation_steps()) + " x " +
                                  std::to_string(engine.mesh().size("dp")));
  if (engine.mesh().size("dp") != engine.communicator().size())
    report.note(LogLevel::Info, "mesh " + engine.mesh().text());
  for (const auto& line : facts.memory) report.note(LogLevel::Info, line);
  for (const auto& line : facts.warnings) report.note(LogLevel::Warning, line);
  if (!report.folder().empty()) report.note(LogLevel::Info, "files in " + report.folder());
  if (s.schedule.total_num_steps > 0 && plan.steps > s.schedule.total_num_steps)
    report.note(LogLevel::Warning, "--steps " + std::to_string(plan.steps) +
                                       " is more than the schedule's total_num_steps " +
                                       std::to_string(s.schedule.total_num_steps));
}

}  // namespace
}  // namespace zero::cli

int zero_train(int argc, char** argv) {
  using namespace zero;
  using namespace zero::cli;
  TrainArguments arguments;
  Command command("train",
                  "train a built-in GPT on your text, or fine-tune a model of a folder, alone or as one of many ranks",
                  "[CONFIG.json] --text FILE | --model NAME|DIR [options]",
                  "  zero run -n 2 zero train configs/gpt-demo.json --text book.txt --steps 300\n"
                  "  zero train --model DIR --task qa --data train.json --steps 500 --export OUT\n");
  declare_train(command, arguments);
  bool parsed = false;
  Failure failure = failure_of([&] { parsed = command.parse(argc, argv); });
  if (failure.code != ExitCode::kOk) return fail_alike("train", failure);
  if (!parsed) return 0;

  TrainPlan plan;
  std::shared_ptr<Communicator> comm;
  std::unique_ptr<TrainTask> task;
  Global global = command.global();
  failure = failure_of([&] {
    plan = plan_train(command, arguments);
    plan.command.assign(argv, argv + argc);
    const config::Settings& settings = plan.options.settings();
    observe::status_page().set_world_rule(config::world_rule(plan.options));
    take_log_level(global, settings);
    prepare_environment(settings, plan.on_gpu);
    if (plan.model_plan)
      task = std::make_unique<ModelTask>(plan);
    else
      task = std::make_unique<ByteTask>(plan);
  });
  const Failure no_ranks = failure_of([&] { comm = Communicator::from_env(); });
  if (no_ranks.code != ExitCode::kOk) {
    publish(no_ranks);
    print_error("train", no_ranks.text);
    return static_cast<int>(no_ranks.code);
  }
  if (failure.code == ExitCode::kOk)
    failure = failure_of([&] { config::require_expert_ranks(plan.options, comm->size()); });
  if (const int code = agree_on_start("train", *comm, failure); code != 0) return code;

  if (comm->rank() != 0) {  // rank 0 prints the library's notices for all ranks
    global.log_level = "error";
    install_log_sink("train", global);
  }
  int code = 0;
  failure = failure_of([&] {
    plan.options = task->fit(plan.options, comm->size());
    // Select the GPU first: seeding queries libtorch for CUDA, and the first result is cached ([Note: asked too
    // early]).
    const c10::Device device = device_of(plan, *comm);
    torch::manual_seed(plan.options.settings().seed);
    Engine engine(task->build(device), plan.options, comm);
    task->begin(engine);
    TrainReport report(global, plan, comm->rank());
    for (const std::string& notice : command.notices()) report.note(LogLevel::Warning, notice);
    for (const std::string& notice : plan.options.notices()) report.note(LogLevel::Warning, notice);
    if (plan.options.settings().dump_state)
      report.note(LogLevel::Info, "\n" + plan.options.explain(comm->size(), false));
    introduce(report, plan, task->facts(), engine, device);
    code = TrainRun(plan, *task, engine, device, report).run();
  });
  if (failure.code == ExitCode::kOk) return code;
  publish(failure);
  comm->abort(failure.text);
  // For these errors all ranks have the same text.
  const bool same_text = failure.code == ExitCode::kNumerical || failure.code == ExitCode::kCheckpoint;
  if (!same_text || comm->rank() == 0) print_error("train", failure.text);
  return static_cast<int>(failure.code);
}
