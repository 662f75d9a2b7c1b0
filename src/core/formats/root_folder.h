// ROOT, the directory of a run's checkpoints: finds complete checkpoints and the newest one, and commits a new one with
// a single rename. Does not read the contents of a checkpoint's data files.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::formats {

// Holds ROOT's lock, against other processes and against other objects of this one. Where the file system has no flock,
// a file kOwnerName stands for it, which names the host, the process and its start; one that a dead process of this
// host has left is replaced.
class RootLock {
 public:
  // Throws ConfigError that begins with `where` if it is held.
  RootLock(const Folder& root, const char* where);
  ~RootLock();
  RootLock(const RootLock&) = delete;
  RootLock& operator=(const RootLock&) = delete;

 private:
  void claim_owner_file(const char* where);
  const Folder& root_;
  File file_;
  bool owns_file_ = false;
};

// Tries lock and sync of ROOT, which is made if it is missing, so that what its file system lacks is told before a run
// has something to save. A lock that another process holds is no fault. Throws IoError.
void probe_root(FsOps& fs, const std::string& root);

// Rank 0's part of a save. Holds the lock of ROOT. Without a commit, the destructor removes what was written.
// docs/checkpoints.md describes the steps and the state after a crash in each.
class Commit {
 public:
  // Creates ROOT, locks it, removes leftovers of dead writers, creates ROOT/.tmp-<id>. weights_only: the pointer stays,
  // and a checkpoint that can be resumed from is not replaced. Throws ConfigError for that, and if another process is
  // saving here, IoError otherwise.
  Commit(FsOps& fs, const std::string& root, const std::string& tag, bool weights_only = false);
  ~Commit();
  Commit(const Commit&) = delete;
  Commit& operator=(const Commit&) = delete;

  const std::string& id() const { return id_; }
  std::int64_t seq() const { return seq_; }
  // The tag that the pointer names; empty: none.
  const std::string& previous() const { return previous_; }
  std::string folder_name() const { return ".tmp-" + id_; }
  // Call after every rank's file is on disk: writes manifest and SUMS, renames, syncs, updates latest. Sets tag, id and
  // seq of the manifest. Replaces an older checkpoint of this tag.
  void publish(Manifest manifest);

 private:
  void remove_leftovers();
  void probe_exchange();
  std::int64_t highest_seq();

  Folder root_;
  std::string tag_, id_, previous_;
  std::int64_t seq_ = 1;
  bool weights_only_ = false, replaces_ = false;
  bool ours_ = false;  // .tmp-<id> exists and holds this save, not the checkpoint it replaced
  std::optional<RootLock> lock_;
};

// Checkpoints that a reader can use: those that a run can resume from; these, or without any those of weights only; the
// newest of all.
enum class Needs { Training, TrainingIfAny, Weights };

struct Choice {
  std::string tag, manifest_hash;
  std::vector<std::string> notices;  // one line per newer candidate that was skipped, with the reason
};
// Faults that a reader found in the data of checkpoints, by tag.
using Faults = std::map<std::string, std::string>;
// The given tag, whatever it holds, or, if it is empty, the newest complete checkpoint of use without a known fault.
// Throws IoError (kCheckpoint) with every candidate's fault if there is none.
Choice choose(FsOps& fs, const std::string& root, const std::string& tag, Needs needs = Needs::Training,
              const Faults& known = {});

// The entry of a file in the SUMS of a checkpoint of this root, with its size; nullopt: none, or the checkpoint is
// damaged.
std::optional<Manifest::FileEntry> listed_file(const Folder& checkpoint, const std::string& name);

// Checks that SUMS is valid, the manifest matches it, and every file exists, is regular and has its size. Returns the
// manifest's hash.
std::string require_whole(const Folder& checkpoint);

// Reads the manifest; its hash must be `hash`.
Manifest read_manifest(const Folder& checkpoint, const std::string& hash, Extent extent = Extent::Checkpoint);

}  // namespace zero::formats
