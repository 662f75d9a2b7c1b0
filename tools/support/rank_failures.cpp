// See rank_failures.h. A launcher ends all ranks when one exits: messages are printed before.
#include "tools/support/rank_failures.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "observe/status_page.h"
#include "tools/support/console.h"

namespace zero::cli {
namespace {

// Uses the launcher's variables.
bool is_first_rank() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* value = std::getenv(name)) return std::string(value) == "0";
  return true;
}

}  // namespace

Failure failure_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const c10::OutOfMemoryError& error) {
    return {ExitCode::kOutOfMemory, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    // libtorch's CPU allocator has no error type of its own.
    return {text.find("DefaultCPUAllocator") == std::string::npos ? ExitCode::kFailed : ExitCode::kOutOfMemory, text};
  } catch (const std::bad_alloc&) {
    return {ExitCode::kOutOfMemory, "[memory] cannot allocate: out of memory"};
  } catch (const std::exception& error) {
    return {ExitCode::kFailed, error.what()};
  }
}

void publish(const Failure& failure) { observe::status_page().set_error(failure.text, failure.code); }

int fail_alike(const std::string& command, const Failure& failure) {
  publish(failure);
  if (is_first_rank())
    print_error(command, failure.text);
  else
    std::this_thread::sleep_for(std::chrono::seconds(1));  // time for the first rank
  return static_cast<int>(failure.code);
}

int agree_on_start(const std::string& command, Communicator& comm, const Failure& mine) {
  if (mine.code != ExitCode::kOk) publish(mine);
  const std::vector<std::string> all = comm.all_gather_bytes(mine.text);
  bool any = false, equal = true;
  for (const std::string& text : all) {
    any = any || !text.empty();
    equal = equal && text == all.front();
  }
  if (!any) return 0;
  if (!mine.text.empty() && (!equal || comm.rank() == 0)) {
    const std::string where =
        equal ? "" : " (rank " + std::to_string(comm.rank()) + "/" + std::to_string(comm.size()) + ")";
    print_error(command, mine.text + where);
  }
  comm.barrier();
  return static_cast<int>(mine.code == ExitCode::kOk ? ExitCode::kConfig : mine.code);
}

}  // namespace zero::cli
