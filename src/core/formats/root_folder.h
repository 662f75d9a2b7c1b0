// ROOT, the directory of a run's checkpoints: which of them are whole, which is the newest, and the
// commit of a new one by a single rename. What is inside a checkpoint's files is not known here.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "formats/files.h"
#include "formats/manifest.h"

namespace zero::formats {

// Rank 0's side of a save. Holds the lock of ROOT while it lives; unless committed, the destructor
// removes what was written. See docs/checkpoints.md for the steps and what a crash after each leaves.
class Commit {
 public:
  // Makes ROOT, takes its lock, removes what dead writers left, makes ROOT/.tmp-<id>. Throws
  // ConfigError when another process saves here, IoError otherwise.
  Commit(FsOps& fs, const std::string& root, const std::string& tag);
  ~Commit();
  Commit(const Commit&) = delete;
  Commit& operator=(const Commit&) = delete;

  const std::string& id() const { return id_; }
  std::int64_t seq() const { return seq_; }
  std::string folder_name() const { return ".tmp-" + id_; }
  // After every rank's file is on disk: writes manifest and SUMS, renames, syncs, updates latest.
  // Completes tag, id and seq of the manifest. An older checkpoint of this tag is replaced.
  void publish(Manifest manifest);

 private:
  void remove_leftovers();
  void probe_exchange();
  std::int64_t highest_seq() const;

  Folder root_;
  std::string tag_, id_;
  std::int64_t seq_ = 1;
  bool replaces_ = false;
  bool ours_ = false;  // .tmp-<id> is there and holds this save, not the checkpoint it replaced
  std::optional<File> lock_;
};

struct Choice {
  std::string tag, manifest_hash;
  std::vector<std::string> notices;  // a line for each newer candidate that was skipped, and why
};
// The tag asked for, or when it is empty the newest whole checkpoint. Throws IoError (kCheckpoint)
// when there is none, with every candidate's fault.
Choice choose(FsOps& fs, const std::string& root, const std::string& tag);

// SUMS parses, the manifest is the one it names, every file is there, regular and of its size.
// Returns the manifest's hash.
std::string require_whole(const Folder& checkpoint);

// The manifest, whose hash must be `hash`.
Manifest read_manifest(const Folder& checkpoint, const std::string& hash);

}  // namespace zero::formats
