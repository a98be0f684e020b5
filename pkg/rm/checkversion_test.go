// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"bytes"
	"strings"
	"testing"
)

func TestCheckVersion(t *testing.T) {
	const own = "580.159.04"
	full := strings.Repeat("5", CheckVersionSize-CheckVersionString) // not terminated
	for _, x := range []struct {
		name   string
		driver string
		cmd    uint32
		said   string
		ok     bool
		want   string // said afterwards, up to its end
	}{
		{"the same", own, 0, own, true, own},
		{"the same, with rubbish behind it", own, 0, own + "\x00rubbish", true, own},
		{"another", own, 0, "570.124.06", false, own},
		{"longer", own, 0, own + "0", false, own},
		{"shorter", own, 0, "580.159.0", false, own},
		{"none", own, 0, "", false, own},
		{"without an end", own, 0, full, false, own},
		{"relaxed, of the branch", own, CheckVersionRelaxed, "580.1", true, "580.1"},
		{"relaxed, of another", own, CheckVersionRelaxed, "570.124.06", false, own},
		{"relaxed, without a dot", own, CheckVersionRelaxed, "580", false, own},
		{"relaxed, the dot alone", own, CheckVersionRelaxed, "580.", true, "580."},
		{"an unknown command compares", own, 7, own, true, own},
		{"an unknown command compares", own, 7, "580.1", false, own},
		{"a question", own, CheckVersionQuery, full, true, own},
		{"what was an override", "525.147.05", CheckVersionQuery, "1.2", true, "1.2"},
	} {
		abi, err := ForDriver(x.driver, false)
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, CheckVersionSize)
		PutU32(p, CheckVersionCmd, x.cmd)
		copy(p[CheckVersionString:], x.said)
		ok := abi.CheckVersion(p, x.driver)
		said, _, _ := bytes.Cut(p[CheckVersionString:], []byte{0})
		if ok != x.ok || string(said) != x.want || U32(p, CheckVersionReply) != 1 || U32(p, CheckVersionCmd) != x.cmd {
			t.Errorf("%s: %v, %q, reply %d; want %v, %q", x.name, ok, said, U32(p, CheckVersionReply), x.ok, x.want)
		}
	}
}
