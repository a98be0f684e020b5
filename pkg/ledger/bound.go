// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/opencgpu/cgpu/pkg/terminal"
)

// Each guard of the node reads the whole ledger at each change of it, so a long string in one record costs every start on the node
// (24 containers with names of 1 MiB: 3.9 s each). Tenants choose names, and what an allocation or an annotation is called.
const (
	// MaxText bounds each string of a record that is not a path, in bytes.
	MaxText = 256
	// maxPath bounds paths: whoever starts a container can choose its cgroup's. Kubernetes' have some 200 bytes.
	maxPath = 1024
	// maxFile bounds ledger.json. A record has about 700 bytes, and there are at most 64 for each GPU (sched.MaxMaxInst).
	maxFile = 16 << 20
)

// DisplayName makes a name that is only shown fit for a record or an event: what is too long is cut, which the sign at its end shows, and
// what a terminal acts on is replaced. (In JSON such a character would take six bytes, too.)
func DisplayName(name string) string {
	const mark = "…"
	if len(name) > MaxText {
		end := MaxText - len(mark)
		for end > 0 && !utf8.RuneStart(name[end]) {
			end--
		}
		name = name[:end] + mark
	}
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || terminal.Acts(r) {
			return '?'
		}
		return r
	}, name)
}

// bound cuts what is only shown and refuses every other string of a record that is too long. What is not looked at here the node itself
// makes: nonce, sockets, page, and UUIDs, which Reserve compares with its GPUs'.
func (r *Record) bound() error {
	r.Name = DisplayName(r.Name)
	texts := [][2]string{{"the bundle's path", r.Bundle}, {"the cgroup's path", r.Cgroup}, {"the path of --root", r.Root},
		{"the limited cgroup's path", r.LimitedCgroup}, {"the container's ID", r.ID}}
	for i := range r.Allocated {
		texts = append(texts, [2]string{"the name of an allocation", r.Allocated[i].ID})
	}
	for _, owner := range r.Owners {
		texts = append(texts, [2]string{"an owner", owner})
	}
	for name, value := range r.ByPod {
		texts = append(texts, [2]string{"the name of an annotation", name}, [2]string{"an annotation", value})
	}
	for i, t := range texts {
		most := MaxText
		if i < 4 {
			most = maxPath
		}
		if len(t[1]) > most {
			return fmt.Errorf("ledger: %s %.40q…: has %d bytes, want at most %d: take a shorter one", t[0], t[1], len(t[1]), most)
		}
	}
	return nil
}
