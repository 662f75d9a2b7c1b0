// What all groups of this rank over shared memory have in common: the arenas of the ranks of one host, mapped; their
// processes and bells; and the first failure, which ends all of them. A group that is split from another opens no file,
// socket or mapping of its own: its pages lie in these arenas.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/shm/page.h"
#include "comm/shm/rendezvous.h"
#include "comm/shm/shared_pieces.h"
#include "comm/transport.h"

namespace zero::comm::shm {

class Host : public std::enable_shared_from_this<Host> {
 public:
  // Connects the ranks of `identity`, see make_shm(). Create with std::make_shared.
  Host(const net::ProcessInfo& identity, std::chrono::milliseconds timeout, std::function<void()> abort_check,
       Mappings* mappings);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  const std::shared_ptr<Arena>& arena() const { return arena_; }
  // Keeps the host alive.
  std::shared_ptr<SharedPieces> pieces() { return {shared_from_this(), pieces_.get()}; }

  // Of a rank of the host. Its arena as mapped here; whether its process has ended.
  const std::byte* base(int rank) const { return bases_[static_cast<std::size_t>(rank)]; }
  pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  bool gone(int rank) const;

  // Wakes the ranks that wait for this one.
  void ring();
  std::uint32_t bell(int rank) const { return page(rank).bell.load(); }
  // Waits for the bell to change from this value. True if the time is over.
  bool sleep(int rank, std::uint32_t bell, std::chrono::nanoseconds time);

  // Calls the abort_check, if there is one.
  void check_abort() const {
    if (abort_check_) abort_check_();
  }
  // Records a failure for all ranks, unless one exists, and wakes them. `rank` is a rank of the run. Thread-safe.
  void fail(std::string_view text, std::string_view hint, int rank) noexcept;
  // The recorded failure. It is permanent.
  const Failure* failure() const;

  // A page for this rank in a group to come. Repeated calls return the same one, until it is taken. The page belongs to
  // the caller that takes it: when its rank leaves the group, the caller ends the counter and gives the page to
  // pieces().
  PagePlace offer();
  PagePlace take_offer();
  // Of the group of all ranks.
  static PagePlace first_page();

 private:
  HostPage& page(int rank) const;

  const int me_;
  const std::function<void()> abort_check_;
  const std::shared_ptr<Arena> arena_;
  std::vector<pid_t> pids_;
  std::vector<base::Descriptor> processes_;
  std::vector<std::shared_ptr<Mapping>> mappings_;  // none for this rank
  std::vector<const std::byte*> bases_;
  std::unique_ptr<SharedPieces> pieces_;
  std::optional<PagePlace> offer_;
};

}  // namespace zero::comm::shm
