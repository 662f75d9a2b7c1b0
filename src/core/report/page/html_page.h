// The page of `zero report`: one HTML file that opens offline. What is drawn is decided in chart_data.h, how in the
// page's script and style; here are its sections, its tables and the escaping of all that came from a run.
#pragma once
#include <string>
#include <vector>

#include "report/page/run_record.h"

namespace zero::report {

// The whole document. Runs need labels (label_runs()); they keep their order, colours included.
std::string html_page(const std::vector<RunRecord>& runs);

// Parts of the document that no run changes: the files of the folder page, which the build puts into the program.
const char* page_style();
const char* page_script();

}  // namespace zero::report
