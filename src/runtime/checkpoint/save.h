// One save: what it writes, and how the ranks agree on it. Implements checkpoint::save(), and the save in the
// background.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "formats/rank_file.h"
#include "formats/root_folder.h"

namespace zero::checkpoint {

// Elements [at, at + numel) of a piece, by its number; valid while the pointer lives.
using ReadPiece = std::function<std::shared_ptr<const void>(std::size_t piece, std::int64_t at, std::int64_t numel)>;
// What a file gets of piece number `number`.
formats::Source source_from(const engine::StatePiece& piece, std::size_t number, const ReadPiece& read);

class Save {
 public:
  Save(engine::State& state, formats::FsOps& fs, std::string root, const SaveOptions& options);

  // [collective] The ranks agree on the save, and rank 0 begins a directory for it.
  void begin(const std::string& wanted_tag);
  // [local] Writes this rank's files; in any thread. Returns the hash of the report about them.
  std::string write(const ReadPiece& read);
  // [collective] Rank 0 checks that the checkpoint is complete and publishes it. reports: what write() returned, by
  // rank.
  void publish(const std::vector<std::string>& reports);

  // What this rank saves. Valid from begin() on.
  std::vector<engine::StatePiece>& pieces() { return pieces_; }
  const std::string& tag() const { return tag_; }
  // What write() writes of them; known when it reads the first piece.
  std::uint64_t bytes() const { return bytes_; }
  const std::string& root() const { return root_; }

 private:
  // The save that a rank requests: tag, step and hashes_of_buffers().
  struct Intent {
    std::string tag, step, buffers;
  };
  static Intent intent_in(const std::string& text);
  void agree_on_request(const std::string& wanted_tag);
  void begin_commit();
  void describe();
  formats::RankFile write_frozen(const formats::Folder& root, const formats::Folder& folder,
                                 const std::vector<formats::Source>& frozen);

  engine::State& state_;
  comm::Group& comm_;
  formats::FsOps& fs_;
  const std::string root_;
  const SaveOptions options_;
  std::vector<engine::StatePiece> pieces_;
  std::vector<std::string> buffers_;   // hashes_of_buffers() of all ranks
  std::string tag_, folder_;           // folder_: the directory that is written to
  std::string previous_;               // tag of the checkpoint before; empty: none
  formats::Manifest manifest_;         // as far as it is known at the beginning
  std::vector<std::string> exported_;  // names of files for other libraries
  std::optional<formats::Commit> commit_;
  std::uint64_t bytes_ = 0;
};

}  // namespace zero::checkpoint
