// SPDX-License-Identifier: Apache-2.0

// Package walk makes up a program of driver calls, carries it out in several processes of one container, and finds the shortest part
// of it that still fails.
//
// What it makes up is a list of operations, and nothing else: a list can be printed, carried out again, and shortened. So that a part
// of a list is a list too, operations name things by numbers that the list gives them: p3 is a process, f5 an open file, c2 an RM client,
// o17 an object (and its handle), and an operation on what is not there is made all the same, or left out where calls must be well-formed.
//
// The processes make the calls and nothing more (Serve); who has what is known to the one that started them (Run). What must be true
// meanwhile, somebody outside of the container looks at: he is asked between the steps.
package walk

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Op is one operation of a process. Operations of one step are carried out at the same time.
type Op struct {
	Step  int
	Proc  int
	Do    string   // what, a key of the table in calls.go or process.go
	Args  []string // names and numbers
	Wrong []string // how the call is made slightly wrong: o+8=c2, b+64=0xffffffff, ptr=8, fd=f3, cmd=0xc0104629, xfer
}

// String is a line: 12 p3 alloc c2 o17 o5 0x40 4194304 !b+64=0xffffffff
func (o Op) String() string {
	s := fmt.Sprintf("%d p%d %s", o.Step, o.Proc, o.Do)
	for _, a := range o.Args {
		s += " " + a
	}
	for _, w := range o.Wrong {
		s += " !" + w
	}
	return s
}

// Text is a list as lines.
func Text(ops []Op) string {
	var b strings.Builder
	for _, o := range ops {
		fmt.Fprintln(&b, o)
	}
	return b.String()
}

// Parse reads what Text wrote; empty lines and comments (#) are skipped.
func Parse(r io.Reader) ([]Op, error) {
	var ops []Op
	sc := bufio.NewScanner(r)
	for sc.Scan() {
		line, _, _ := strings.Cut(sc.Text(), "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		var o Op
		var err error
		if len(words) >= 3 {
			o.Step, err = strconv.Atoi(words[0])
		}
		if len(words) < 3 || err != nil || !strings.HasPrefix(words[1], "p") {
			return nil, fmt.Errorf("walk: %q: want STEP pN OPERATION ARGUMENTS", line)
		}
		o.Proc, o.Do = number(words[1]), words[2]
		for _, w := range words[3:] {
			if wrong, ok := strings.CutPrefix(w, "!"); ok {
				o.Wrong = append(o.Wrong, wrong)
			} else {
				o.Args = append(o.Args, w)
			}
		}
		ops = append(ops, o)
	}
	return ops, sc.Err()
}

// arg is an argument; "" if there is none.
func (o Op) arg(i int) string {
	if i < len(o.Args) {
		return o.Args[i]
	}
	return ""
}

// n is the number in a name, or the number.
func (o Op) n(i int) int { return number(o.arg(i)) }

// size is an argument that may need 64 bits.
func (o Op) size(i int) uint64 {
	v, _ := strconv.ParseUint(o.arg(i), 0, 64)
	return v
}

func number(s string) int {
	n, _ := strconv.ParseInt(strings.TrimLeft(s, "pfco"), 0, 64)
	return int(n)
}
