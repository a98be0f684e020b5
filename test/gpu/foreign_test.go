// SPDX-License-Identifier: Apache-2.0

// Package gpu has the scripts for a machine with a GPU; here they are tested as far as they need none.
package gpu

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// docker runs a container's command at once: -e sets variables, and VGPU where cgpu is the runtime.
const docker = `#!/bin/bash
[[ $1 == run ]] || exec cat >/dev/null
while [[ $1 != host ]]; do
	[[ $1 != -e || $2 != *=* ]] || export "${2?}"
	[[ ${2-} != ALIYUN_COM_GPU_MEM_CONTAINER=refused ]] || exec echo too much
	[[ $1 != --runtime || $2 != cgpu ]] || export VGPU=1
	shift
done
shift
exec "$@"
`

// pytest stands in for Python with pytest, and writes what foreign_report.py would.
const pytest = `#!/bin/bash
[[ $1 != -c ]] || exit 0
tests=("${@: -1}")
grep -v ^- "${tests#@}" | while read -r name; do
	case $name in
	*::differs) printf '%s\t%s\n' "$name" "${VGPU:+not }passed" ;;
	*::once) [[ $tests == *again* ]] || printf '%s\t%s\n' "$name" "${VGPU:+failed}" | sed 's/\t$/\tpassed/' ;;
	*::absent) [[ ${VGPU-} ]] || printf '%s\tpassed\n' "$name" ;;
	*) printf '%s\tskipped\n' "$name" ;;
	esac
done >>"$FOREIGN_RESULTS"
`

func TestForeign(t *testing.T) {
	programs := func(scripts map[string]string) map[string]string {
		files := map[string]string{}
		for name, script := range scripts {
			files["cuda-samples/build/"+name+"/"+name] = "#!/bin/sh\n" + script + "\n"
		}
		return files
	}
	for _, tt := range []struct {
		name  string
		files map[string]string
		known string
		env   string
		exit  int
		want  []string // each matches a line
		never string
	}{
		{name: "the same", files: programs(map[string]string{"good": "exit 0", "bad": "exit 3"}), want: []string{
			`no nccl-tests in `, `cuda-samples: 2 tests$`,
			`^foreign: 2 tests of 1 suites: 0 differences, 0 known ones; bare [0-9.]+ s, vGPU [0-9.]+ s$`}, never: "DIFF"},
		{name: "a difference", files: programs(map[string]string{"good": "exit 0", "hidden": `exit "${VGPU:-0}"`}), exit: 1, want: []string{
			`^DIFF  cuda-samples ./build/hidden/hidden: bare exit 0, vGPU exit 1; again: bare exit 0, vGPU exit 1$`, ` 1 differences, 0 known`}},
		{name: "a known one", files: programs(map[string]string{"hidden": `exit "${VGPU:-0}"`}),
			known: "# text\ncuda-samples */hidden it looks\n", want: []string{
				`^known cuda-samples ./build/hidden/hidden: bare exit 0, vGPU exit 1 \(it looks\)$`, ` 0 differences, 1 known`}},
		{name: "known of another suite", files: programs(map[string]string{"hidden": `exit "${VGPU:-0}"`}),
			known: "nccl-tests * no\ncuda-samples hid* no\n", exit: 1,
			want: []string{` 1 differences, 0 known`}},
		{name: "noise", files: programs(map[string]string{"noise": `[ -e seen ] && exit 0; [ -z "$VGPU" ] || touch seen; exit "${VGPU:-0}"`}),
			want: []string{
				`^once  cuda-samples ./build/noise/noise: bare exit 0, vGPU exit 1; the same when run again$`, ` 0 differences, 0 known`}},
		{name: "a program that hangs on the vGPU", files: programs(map[string]string{"hangs": `[ -z "$VGPU" ] || exec sleep 60`}), env: "LIMIT=1",
			exit: 1, want: []string{
				`bare exit 0, vGPU exit 124; again`}},
		{name: "in its own folder, and not what else is there", files: map[string]string{
			"cuda-samples/build/a/a": "#!/bin/sh\nexec cat data.txt", "cuda-samples/build/a/data.txt": "x", "cuda-samples/run.sh": "exit 1",
			"cuda-samples/build/CMakeFiles/b": "exit 1"},
			want: []string{`: 1 tests of 1 suites: 0 `}},
		{name: "nccl-tests", files: map[string]string{"nccl-tests/build/sum_perf": `#!/bin/sh
[ "$* $NCCL_NVLS_ENABLE" = "-b 1K -e 64M -f 8 -g 1 0" ] && exit "${VGPU:-0}"`, "nccl-tests/build/other": "exit 1"}, exit: 1, want: []string{`DIFF  nccl-tests build/sum_perf: bare exit 0, vGPU exit 1;`}},
		{name: "pytest", files: map[string]string{"cupy/pytest.args": "-q\nt.py::same\nt.py::differs\nt.py::absent\n"}, exit: 1, want: []string{
			`^DIFF  cupy t.py::absent: bare passed, vGPU no result; again: bare passed, vGPU no result$`,
			`^DIFF  cupy t.py::differs: bare passed, vGPU not passed; `, `: 3 tests of 1 suites: 2 differences`}},
		{name: "pytest, and what cannot be run again by its name", files: map[string]string{"cupy/pytest.args": "t.py::once\n"},
			exit: 1, want: []string{
				`^DIFF  cupy t.py::once: bare passed, vGPU failed; again: bare no result, vGPU no result$`}},
		{name: "pytest, and what is prepared for it", files: map[string]string{"cupy/pytest.args": "t.py::same\n",
			"cupy/prepare": "#!/bin/sh\necho t.py::differs >>pytest.args"}, exit: 1, want: []string{`: 2 tests of 1 suites: 1 differences`}},
		{name: "pytest, and what cannot be prepared",
			files: map[string]string{"cupy/pytest.args": "t.py::same\n", "cupy/prepare": "#!/bin/sh\nexit 1"},
			want:  []string{`^foreign: cupy: not all of it could be built: `, `: 1 tests of 1 suites: 0 differences`}},
		{name: "a vGPU that is not to be had", env: "SIZE=refused", files: programs(map[string]string{"good": "exit 0"}), exit: 1, want: []string{
			`^FAIL  cuda-samples: vgpu gives no result:\n.*too much`}},
		{name: "by name", env: "ONLY=nccl", files: programs(map[string]string{"hidden": `exit "${VGPU:-0}"`}), exit: 2,
			want: []string{`: 0 tests of 0 suites: `}},
		{name: "nothing there", exit: 2, want: []string{`no cuda-samples in `, `: 0 tests of 0 suites: `}},
		{name: "a suite without a program", files: map[string]string{"cuda-samples/build/README.md": ""}, exit: 1,
			want: []string{`^FAIL  cuda-samples: bare gives no result`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
				return path
			}
			write("dir/README", "")
			for name, text := range tt.files {
				write("dir/"+name, text)
			}
			path := filepath.Dir(write("bin/docker", docker))
			cmd := exec.Command("./foreign.sh", filepath.Join(dir, "dir"))
			cmd.Env = append(os.Environ(), "PATH="+path+":"+os.Getenv("PATH"), "OUT="+filepath.Join(dir, "out"),
				"KNOWN="+write("known.txt", tt.known),
				"PYTHON="+write("bin/pytest", pytest), tt.env)
			out, err := cmd.CombinedOutput()
			code := 0
			if e := new(exec.ExitError); errors.As(err, &e) {
				code = e.ExitCode()
			} else if err != nil {
				t.Fatal(err)
			}
			report := fmt.Sprintf("exit status %d:\n%s", code, out)
			if code != tt.exit {
				t.Errorf("%swant %d", report, tt.exit)
			}
			for _, want := range tt.want {
				if !regexp.MustCompile("(?m)" + want).Match(out) {
					t.Errorf("%swant %q", report, want)
				}
			}
			if tt.never != "" && strings.Contains(string(out), tt.never) {
				t.Errorf("%swant no %q", report, tt.never)
			}
		})
	}
}
