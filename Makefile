# cgpu. `make` prints the targets; README.md names the two that matter: demo and test.

BIN      := bin
MODULE   := github.com/opencgpu/cgpu
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS  := -s -w -X main.version=$(VERSION)
FUZZTIME ?= 10s
PREFIX   ?= /usr/local
# Pinned: a linter that changes by itself makes yesterday's green commit red.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
ERRORLINT := github.com/polyfloyd/go-errorlint@v1.8.0
UNPARAM := mvdan.cc/unparam@v0.0.0-20260823230713-2fa3d841b0c8
NFPM        := github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2

# Every command is static, but cgpu-refresh: it asks NVML, which go-nvml loads through cgo.
CGO_COMMANDS    := cgpu-refresh
STATIC_COMMANDS := $(filter-out $(CGO_COMMANDS),$(notdir $(wildcard cmd/*)))

# go-nvml declares all of NVML, deprecated functions included, and gcc would warn of each on every build.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# Root may build a clone that belongs to somebody else, which git, and with it go build, refuses otherwise.
export GIT_CONFIG_COUNT := 1
export GIT_CONFIG_KEY_0 := safe.directory
export GIT_CONFIG_VALUE_0 := $(CURDIR)

# Not every machine can reach the module proxy. CI must.
ENGINES := engines=$$(hack/engines.sh) || [ -z "$$CI" ] || exit 1; CGPU_TEST_ENGINES=$$engines

# The targets share bin/ and two cores; what they run is parallel by itself.
.NOTPARALLEL:

.DEFAULT_GOAL := help
.PHONY: help setup build limiter demo test unit integration kubernetes bench lint drivers support fuzz install clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what demo and test need (apt-get; root), if it is missing
	@hack/setup.sh

build: $(addprefix $(BIN)/,$(STATIC_COMMANDS) $(CGO_COMMANDS) cgpu-probe-libc) limiter ## every binary, libcgpu.so and cgpu-load, into bin/

# Go knows better than make what is stale, so its commands always run.
# Without gRPC's traces cgpu-agent has no text/template, and is 19 MB smaller: cmd/cgpu-agent/flags.go.
$(BIN)/cgpu-agent: TAGS := -tags grpcnotrace
.PHONY: $(addprefix $(BIN)/,$(STATIC_COMMANDS) $(CGO_COMMANDS) cgpu-probe-libc)
$(addprefix $(BIN)/,$(STATIC_COMMANDS)): $(BIN)/%:
	CGO_ENABLED=0 go build $(TAGS) -trimpath -ldflags "$(LDFLAGS)" -o $@ ./cmd/$*
$(addprefix $(BIN)/,$(CGO_COMMANDS)): $(BIN)/%:
	CGO_ENABLED=1 go build -trimpath -ldflags "$(LDFLAGS)" -o $@ ./cmd/$*
# The probe again, linked with the C library: a preload library sees nothing of a static program's calls.
$(BIN)/cgpu-probe-libc:
	CGO_ENABLED=1 go build -tags libc -trimpath -ldflags "$(LDFLAGS)" -o $@ ./cmd/cgpu-probe

limiter: # libcgpu.so and cgpu-load; nothing to do before limiter/ exists
	@if [ -f limiter/Makefile ]; then $(MAKE) -C limiter OUT=$(abspath $(BIN)); fi

demo: setup build ## two containers share one GPU (the real one, else the simulated); ends with "demo: N checks passed"
	@hack/demo.sh

test: setup build lint unit integration kubernetes ## everything that must pass: 20 minutes on 2 cores, once Kubernetes is built

unit: ## tests of the packages and of the limiter, with the race detector
	go test -race -timeout 20m ./cmd/... ./pkg/... ./limiter/... ./hack/... ./deploy/... ./examples ./test/gpu ./test/walk
	@hack/module.sh pkg/rm/parity gvisor.dev/gvisor
	@hack/module.sh test/observability github.com/prometheus/prometheus

integration: build ## conformance suite and the commands in the docs: real docker, containerd, podman, CRI-O, runc, crun and Slurm in private folders (root)
	@# cgpu install is tried with the machine's engines and with today's; other tests need not wait for these.
	$(if $(RUN),$(if $(findstring Install,$(RUN)),$(ENGINES)),$(ENGINES)) hack/with-node.sh -- go test -tags integration -count 1 -p 1 -timeout 60m $(if $(RUN),-run '$(RUN)') $(if $(V),-v) ./test/integration/
	hack/with-node.sh -- go test -tags integration -count 1 -p 1 -timeout 30m $(if $(RUN),-run '$(RUN)') $(if $(V),-v) ./test/docs/ ./test/slurm/ ./test/bench/
	CGPU_BIN=$(abspath $(BIN)) go test -tags integration -count 1 -timeout $(if $(CGPU_FAULTS)$(CGPU_CHURN)$(CGPU_OPERATIONS),6h,30m) $(if $(RUN),-run '$(RUN)') $(if $(V),-v) ./test/faults/

kubernetes: build ## pods on a real Kubernetes 1.36 of this machine, in namespaces of its own (root); builds it once, in six minutes
	@test/kubernetes/build.sh node
	@CGPU_BIN=$(abspath $(BIN)) test/kubernetes/images.sh
	test/kubernetes/with-control-plane.sh go test -tags kubernetes -count 1 -timeout 20m $(if $(V),-v) -p 1 -run '$(or $(RUN),TestServer|TestAgainstAPIServer)' ./deploy ./cmd/cgpu-agent ./pkg/nri
	CGPU_BIN=$(abspath $(BIN)) go test -tags kubernetes -count 1 -timeout 40m $(if $(RUN),-run '$(RUN)') $(if $(V),-v) ./test/kubernetes
	@# The rest over CRI-O is for hands, as is another Kubernetes (docs/internals/testing.md).
	$(if $(RUN),,[ -z "$$CI" ] || CGPU_BIN=$(abspath $(BIN)) test/kubernetes/crio.sh $(if $(V),-v) -run 'TestClaimIsALimit|TestDevicePluginBelowCRIO|TestRestarts/crio')
	test/kubernetes/with-control-plane.sh go test -tags kubernetes -count 1 -timeout 20m $(if $(RUN),-run '$(RUN)') $(if $(V),-v) ./test/kubernetes/dra

bench: setup build ## what a container start, a call and a guard cost, here; a table and bin/bench.json
	hack/with-node.sh -- go run -tags integration ./test/bench -o $(BIN)/bench.json

lint: ## gofmt, length of lines, licence headers, go vet, staticcheck, errorlint, unparam, shellcheck
	@hack/lint.sh $(STATICCHECK) $(ERRORLINT) $(UNPARAM)

drivers: ## which driver branches there are tables for, and what differs; writes docs/drivers.md
	@go run ./hack/drivers matrix

support: ## what cgpu was tried with; writes docs/support.md
	@go run ./hack/support

fuzz: ## every fuzz target for FUZZTIME (10s)
	@hack/fuzz.sh $(FUZZTIME)

# What is built is not built again: sudo's PATH often has no go, and root's cache would begin with nothing.
built = $(if $(wildcard $(BIN)/$1),,$2)
install: $(call built,cgpu-runtime,build) ## what is built into PREFIX (/usr/local), systemd units where there is systemd; then cgpu install
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/cgpu
	install -m 0644 $(BIN)/libcgpu.so $(DESTDIR)$(PREFIX)/lib/cgpu/
	install -m 0755 $(BIN)/cgpu-load $(DESTDIR)$(PREFIX)/lib/cgpu/
	install -m 0755 $(addprefix $(BIN)/,$(filter-out cgpu-sim cgpu-agent kubectl-cgpu,$(STATIC_COMMANDS)) $(CGO_COMMANDS)) $(DESTDIR)$(PREFIX)/bin/
	@# systemd and udev read below /usr/local as well; on machines without them these files would only puzzle.
	@if [ -n "$(DESTDIR)" ] || [ -d /run/systemd/system ] || [ -d /usr/lib/systemd/system ]; then \
		lib=$(DESTDIR)$(PREFIX)/lib && install -d $$lib/systemd/system $$lib/udev/rules.d $$lib/tmpfiles.d && \
		for unit in $(filter-out configs/cgpu-agent.service,$(wildcard configs/*.service)); do \
			sed 's|/usr/bin/|$(PREFIX)/bin/|g' $$unit >$$lib/systemd/system/$${unit##*/} || exit 1; \
		done && \
		chmod 0644 $$lib/systemd/system/cgpu-*.service && \
		install -m 0644 configs/71-cgpu.rules $$lib/udev/rules.d/ && \
		install -m 0644 configs/cgpu.conf $$lib/tmpfiles.d/; \
	fi

# Not a part of install: only nodes of Kubernetes that do without the DaemonSet in deploy/ want it, and it is large.
.PHONY: install-agent
install-agent: $(call built,cgpu-agent,$(BIN)/cgpu-agent) # cgpu-agent and its systemd unit into PREFIX
	install -D -m 0755 $(BIN)/cgpu-agent -t $(DESTDIR)$(PREFIX)/bin
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's|/usr/bin/|$(PREFIX)/bin/|g' configs/cgpu-agent.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/cgpu-agent.service
	chmod 0644 $(DESTDIR)$(PREFIX)/lib/systemd/system/cgpu-agent.service

# Not a part of install either: it is for the machines of people, with kubectl.
.PHONY: install-kubectl
install-kubectl: $(call built,kubectl-cgpu,$(BIN)/kubectl-cgpu) # the plugin of kubectl and its completion into PREFIX
	install -D -m 0755 $(BIN)/kubectl-cgpu packaging/kubectl_complete-cgpu -t $(DESTDIR)$(PREFIX)/bin

.PHONY: package package-test
package: ## deb and rpm for amd64 and arm64 into dist/; docs/packages.md tells what is in them
	@packaging/build.sh $(NFPM) dist "$(VERSION)"

package-test: package ## the packages are reproducible, install, run and leave nothing behind (root)
	@test/package.sh $(NFPM) dist "$(VERSION)"

.PHONY: release
release: ## all that a release consists of into dist/: packages, the agent's image, checksums, SBOM; HEAD must be a tag (docs/release.md)
	@packaging/release.sh $(NFPM) dist "$(VERSION)"

clean: ## remove what build and the tests made
	rm -rf $(BIN) .cache dist
