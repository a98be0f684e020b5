// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencgpu/cgpu/pkg/golden"
)

// TestDocs: docs/internals/probe.md says what the tables say; go test -update writes it anew.
func TestDocs(t *testing.T) {
	cell := strings.NewReplacer("|", `\|`).Replace
	var b strings.Builder
	b.WriteString("# cgpu-probe\n\n<!-- Made from cmd/cgpu-probe/probe by `go test ./cmd/cgpu-probe/probe -update`; edit its tables. -->\n\n" +
		"The program of the conformance suite: driver calls without NVIDIA's libraries, from inside what a tenant can see, take and break.\n" +
		"Results are `key=value` lines; the exit status is 0 if everything was as it must be, else 1.\n\n## Commands\n\n| command | does " +
		"|\n|---|---|\n")
	for _, c := range commands() {
		fmt.Fprintf(&b, "| `%s` | %s |\n", cell(strings.TrimSpace(c.name+" "+c.args)), cell(c.help))
	}
	b.WriteString("\n## Cases of hostile\n\nEach is a way around the limit, and runs in a process of its own. Some the kernel may end, " +
		"which is a defence too.\n\n" +
		"| case | when it succeeds |\n|---|---|\n")
	seen := map[string]bool{}
	for _, a := range attacks() {
		if a.proves == "" || seen[a.name] {
			t.Errorf("case %q: says nothing, or is there twice", a.name)
		}
		seen[a.name] = true
		killed := ""
		if a.killed {
			killed = "; or the process is ended"
		}
		fmt.Fprintf(&b, "| `%s` | %s%s |\n", a.name, cell(a.proves), killed)
	}
	golden.Compare(t, "../../../../docs/internals/probe.md", []byte(b.String()))
}
