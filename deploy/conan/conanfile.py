"""The C++ library and the program zero as a Conan 2 package (docs/deployment.md):

    ZERO_TORCH_DIR=<site-packages>/torch conan create deploy/conan --build missing

libtorch is in no Conan registry: ZERO_TORCH_DIR is the folder `torch` of PyPI's wheel, and the package works with that
minor version. ZERO_GLOO_INCLUDE is a folder with gloo/context.h, if it is not one of the system's.
"""

import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load
from conan.tools.system.package_manager import Apt

required_conan_version = ">=2.4"


class LibzeroConan(ConanFile):
    name = "libzero"
    description = "Sharded data-parallel training (ZeRO) for PyTorch"
    license = "Apache-2.0"
    topics = ("pytorch", "distributed-training", "zero")
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"
    # system: the system's libraries instead of Conan's. programs: zero-torch, zero-train and zero-lab too.
    # torch: the minor version of the folder's libtorch, set here.
    options = {"system": [True, False], "programs": [True, False], "cuda": [True, False], "torch": [None, "ANY"]}
    default_options = {"system": False, "programs": True, "cuda": False, "torch": None}

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "../../include/zero/version.h"))
        self.version = re.search(r'#define ZERO_VERSION "(.*)"', header)[1]

    def export_sources(self):
        root = os.path.join(self.recipe_folder, "../..")
        for folder in ("apps", "cmake", "include", "lab", "models", "src", "tools"):
            copy(self, f"{folder}/*", root, self.export_sources_folder, excludes=("*/__pycache__/*", "lab/results/*"))
        for file in ("CMakeLists.txt", "LICENSE"):
            copy(self, file, root, self.export_sources_folder)

    def configure(self):
        version = os.path.join(self._torch_dir(), "include/torch/headeronly/version.h")
        if os.path.exists(version):
            parts = dict(re.findall(r"#define TORCH_VERSION_(MAJOR|MINOR) (\d+)", load(self, version)))
            self.options.torch = f"{parts['MAJOR']}.{parts['MINOR']}"

    def validate(self):
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"libzero got {self.settings.os}, expected Linux")

    def validate_build(self):
        if not os.path.exists(os.path.join(self._torch_dir(), "lib/libtorch_cpu.so")):
            raise ConanInvalidConfiguration(
                f"ZERO_TORCH_DIR={self._torch_dir()!r} has no lib/libtorch_cpu.so, "
                "expected the folder 'torch' of a torch wheel"
            )

    def requirements(self):
        if not self.options.system:
            self.requires("highway/[>=1.0.3 <2]")
            self.requires("libsodium/[>=1.0.18 <2]")
            self.requires("liburing/[>=2.3 <3]")
            self.requires("nlohmann_json/[>=3.11.2 <4]")
            self.requires("pcre2/[>=10.42 <11]")
            self.requires("utf8proc/[>=2.8.0 <3]")
            self.requires("xxhash/[>=0.8.1 <1]")
            self.requires("zlib/[>=1.2.13 <2]")

    def system_requirements(self):
        packages = ["libgloo-dev"]
        if self.options.system:
            packages += ["libhwy-dev", "libsodium-dev", "liburing-dev", "nlohmann-json3-dev"]
            packages += ["libpcre2-dev", "libutf8proc-dev", "libxxhash-dev", "zlib1g-dev"]
        # Only checks, unless tools.system.package_manager:mode is install.
        Apt(self).install(packages)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self, generator="Ninja")
        toolchain.cache_variables["ZERO_TORCH_DIR"] = self._torch_dir()
        toolchain.cache_variables["ZERO_CUDA"] = "ON" if self.options.cuda else "OFF"
        for part in ("TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables[f"ZERO_{part}"] = False
        if os.environ.get("ZERO_GLOO_INCLUDE"):
            toolchain.cache_variables["ZERO_GLOO_INCLUDE"] = os.environ["ZERO_GLOO_INCLUDE"]
        # libzero links to its libraries by name.
        for dependency in self.dependencies.host.values():
            info = dependency.cpp_info.aggregated_components()
            toolchain.extra_cxxflags += [f"-isystem {folder}" for folder in info.includedirs]
            toolchain.extra_sharedlinkflags += [f"-L{folder}" for folder in info.libdirs]
            toolchain.extra_exelinkflags += [f"-L{folder}" for folder in info.libdirs]
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target=None if self.options.programs else ["zero", "zero_program"])

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        # Users call find_package(zero), which brings libtorch along.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/zero"]
        self.cpp_info.libs = ["zero"]

    def _torch_dir(self):
        return os.environ.get("ZERO_TORCH_DIR", "")
