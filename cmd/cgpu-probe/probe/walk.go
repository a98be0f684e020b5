// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/opencgpu/cgpu/test/walk"
)

// cmdWalk makes driver calls at random in several processes, list after list (test/walk). With --sync it stops after so many steps, when
// no call is under way, and at the end of a list, when its processes are gone, for somebody outside to compare the books: it prints
// "sync SEED STEP", or "end SEED", and goes on when it is given a line.
func cmdWalk(args []string) error {
	fs := flag.NewFlagSet("walk", flag.ExitOnError)
	seed := fs.Uint64("seed", uint64(time.Now().UnixNano()), "of the first list; each further one has the next")
	how := fs.Duration("for", time.Minute, "begin no list after that")
	kind := walk.Kind{}
	fs.IntVar(&kind.Procs, "procs", 3, "processes at once")
	fs.IntVar(&kind.Steps, "steps", 300, "of a list")
	fs.BoolVar(&kind.Malformed, "malformed", false, "a third of the calls are slightly wrong")
	fs.BoolVar(&kind.Real, "real", false, "only calls as CUDA makes them, for a real driver")
	limit := fs.String("limit", "1GiB", "the container's limit: sizes are such that it is reached")
	every := fs.Int("sync", 0, "steps between two stops; 0: there is none")
	replay := fs.String("replay", "", "carry out the list in this file (-: standard input), once")
	show := fs.Bool("print", false, "print the list of the seed and carry out nothing")
	trace := fs.Bool("trace", false, "show every operation with its result on standard error")
	_ = fs.Parse(args)
	size, err := parseSize(*limit)
	if err != nil {
		return err
	}
	kind.Limit = uint64(size)
	if *show {
		fmt.Print(walk.Text(walk.Generate(*seed, kind)))
		return nil
	}
	walk.Reap()
	in := bufio.NewReader(os.Stdin)
	list := func() ([]walk.Op, error) { return walk.Generate(*seed, kind), nil }
	if *replay != "" {
		list, *how = func() ([]walk.Op, error) { return readWalk(*replay, in) }, 0
	}
	o := walk.Options{Args: []string{os.Args[0], "walk-process"}, Env: os.Environ(), Nodes: "/dev", WellFormed: !kind.Malformed}
	if *trace {
		o.Trace = os.Stderr
	}
	o.Sync = func(step int, end bool) error {
		switch {
		case *every == 0:
			return nil
		case end:
			print("end %#x", *seed)
		case step%*every == 0:
			print("sync %#x %d", *seed, step)
		default:
			return nil
		}
		if _, err := in.ReadString('\n'); err != nil {
			return errors.New("nobody says to go on")
		}
		return nil
	}
	print("seed=%#x", *seed)
	for began := time.Now(); ; *seed++ {
		ops, err := list()
		if err != nil {
			return err
		}
		stats, err := walk.Run(ops, o)
		if err != nil {
			return fmt.Errorf("seed %#x: %w", *seed, err)
		}
		print("list=%#x made=%d refused=%d left_out=%d unanswered=%d", *seed, stats.Made, stats.Refused, stats.LeftOut, stats.Unanswered)
		if time.Since(began) > *how {
			return nil
		}
	}
}

// readWalk reads a list. On standard input it ends with an empty line, since more may follow there.
func readWalk(path string, in *bufio.Reader) ([]walk.Op, error) {
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return walk.Parse(f)
	}
	var text strings.Builder
	for {
		line, err := in.ReadString('\n')
		text.WriteString(line)
		if err == io.EOF || strings.TrimSpace(line) == "" {
			return walk.Parse(strings.NewReader(text.String()))
		}
		if err != nil {
			return nil, err
		}
	}
}

// cmdWalkProcess is a process of a walk, which that starts.
func cmdWalkProcess([]string) error {
	walk.Serve()
	return nil
}
