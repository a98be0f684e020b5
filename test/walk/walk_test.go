// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestText(t *testing.T) {
	ops := Generate(1, Kind{Steps: 300, Procs: 3, Limit: 1 << 30, Malformed: true})
	text := Text(ops)
	again, err := Parse(strings.NewReader("# a comment\n\n" + text))
	if err != nil {
		t.Fatal(err)
	}
	if Text(again) != text {
		t.Error("what is read is not what was written")
	}
	if Text(Generate(1, Kind{Steps: 300, Procs: 3, Limit: 1 << 30, Malformed: true})) != text {
		t.Error("the same seed gives another list")
	}
	for _, bad := range []string{"1 p1", "x p1 start", "1 c1 start"} {
		if _, err := Parse(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

// TestGenerate: every operation occurs, those of CUDA alone where that is asked for, and no operation needs what its own step makes.
func TestGenerate(t *testing.T) {
	for _, test := range []struct {
		name  string
		k     Kind
		never []string
	}{
		{"malformed", Kind{Malformed: true}, []string{"cards", "attach", "instance"}},
		{"well-formed", Kind{}, []string{"uvmnospace", "cards", "attach", "instance"}},
		{"real", Kind{Real: true}, []string{"uvmnospace", "uvmchannel", "uvmnochannel", "uvmregion", "uvmpool", "pin", "hostmap", "schedule"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			seen := map[string]bool{}
			for seed := range uint64(40) {
				k := test.k
				k.Steps, k.Procs, k.Limit = 400, 3, 1<<30
				made := map[string]int{}
				for _, o := range Generate(seed, k) {
					seen[o.Do] = true
					if len(o.Wrong) > 0 && !k.Malformed {
						t.Fatalf("%v", o)
					}
					for i, a := range o.Args {
						at, known := made[a]
						switch {
						case strings.HasPrefix(a, "0x") || !strings.ContainsAny(a[:1], "pfco"):
						case !known && i < 2: // it makes this
							made[a] = o.Step
						case !known:
							t.Fatalf("seed %d: %v: %s comes from nowhere", seed, o, a)
						case at == o.Step && !k.Malformed && o.Do != "root":
							t.Fatalf("seed %d: %v: %s is made in this step", seed, o, a)
						}
					}
				}
			}
			var missing []string
			for name := range calls {
				if !seen[name] && !slices.Contains(test.never, name) {
					missing = append(missing, name)
				}
			}
			for name := range processOps {
				if !seen[name] {
					missing = append(missing, name)
				}
			}
			if len(missing) > 0 {
				t.Errorf("never done: %v", missing)
			}
			for _, name := range test.never {
				if seen[name] {
					t.Errorf("done: %s", name)
				}
			}
		})
	}
}

func TestShrink(t *testing.T) {
	ops := Generate(1, Kind{Steps: 300, Procs: 3, Limit: 1 << 30})
	need := []int{3, 77, 150, len(ops) - 1}
	tries := 0
	short := Shrink(ops, time.Minute, func(try []Op) bool {
		tries++
		return !slices.ContainsFunc(need, func(i int) bool {
			return !slices.ContainsFunc(try, func(o Op) bool { return o.String() == ops[i].String() })
		})
	})
	if len(short) != len(need) || tries > 200 {
		t.Errorf("%d operations after %d tries, want %d:\n%s", len(short), tries, len(need), Text(short))
	}
	if part := UpTo(ops, 10); part[len(part)-1].Step < 11 || part[len(part)-1].Step > 20 || len(UpTo(ops, 1000)) != len(ops) {
		t.Errorf("up to step 10: %v", part[len(part)-1])
	}
	if left := Shrink(ops, 0, func([]Op) bool { return true }); len(left) != len(ops) {
		t.Errorf("without time %d of %d operations are left", len(left), len(ops))
	}
}
