// See live_ranks.h.
#include "tools/explain/live_ranks.h"

#include <ATen/Parallel.h>
#include <zero/communicator.h>
#include <zero/errors.h>

#include "base/check.h"
#include "tools/support/rank_processes.h"

namespace zero::cli {

LiveRun run_live(const LiveTask& task, const Global& global) {
  at::set_num_threads(1);
  if (task.world == 1) return live_steps(task, Communicator::local());
  if (task.transport == "thread") {
    LiveRun run;
    run_ranks(task.world, [&](std::shared_ptr<Communicator> comm) {
      auto one = live_steps(task, comm);
      if (comm->rank() == 0) run = std::move(one);
    });
    return run;
  }
  const RankProcesses ranks{.command = "explain", .world = task.world, .threads = 1, .transport = task.transport};
  const auto outcome = run_rank_processes(ranks, task.json(), global);
  if (outcome.exit_code != 0)
    throw InternalError(base::join("[zero explain] got exit code ", outcome.exit_code, " from the ranks, expected 0"),
                        static_cast<ExitCode>(outcome.exit_code));
  return LiveRun::from(outcome.result);
}

int explain_rank(int argc, char** argv) {
  const auto task = RankTask::from("explain-rank", argc, argv);
  at::set_num_threads(1);
  const auto comm = Communicator::from_env();
  const auto run = live_steps(LiveTask::from(task.task), comm);
  if (comm->rank() == 0) task.hand_over(run.json());
  return 0;
}

}  // namespace zero::cli
