// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// call is what we need to know of the command line.
type call struct {
	args    []string // what goes to the runtime: all as it came, but for what we put in the place of a value
	command string   // create, run, state, …; empty when there is none
	// bundle (absolute), config and id are read for create, run and restore. The id is empty where the runtime will not see just one
	// container, and will refuse.
	bundle    string
	config    string
	id        string
	log       string
	logFormat string
	// root is the folder of the runtime's state, empty where the engine leaves it to the runtime.
	root string
	// rest is what follows the command: the container's id is in it, somewhere among options.
	rest []string
	// tail is what follows create, run and restore, and values are where in it files are named.
	tail   []string
	values []placed
	// made is the folder of the config.json that the low-level runtime gets in the place of the engine's; empty where it keeps that.
	made string
	// strange is an option that may be one of a newer runtime and take a value, which we then took for the id.
	strange string
	grammar *grammar
}

// options are those of a command. Those in values take the next argument as their value.
type options struct{ values, switches []string }

func (o options) known(name string) bool {
	return slices.Contains(o.values, name) || slices.Contains(o.switches, name)
}

// grammar is how a low-level runtime reads its command line.
type grammar struct {
	global, create, exec options // create: of run and restore, too
	// read walks over the options at the beginning of args and returns what follows. at is the argument that a value is, or ends.
	read func(args []string, o options, found func(name, value string, at int)) (rest []string)
	// reorders: options of create, run and restore may follow the container's id.
	reorders bool
}

// Those of runc 1.5 and crun 1.8, and of the runtimes that read as they do.
var (
	globalSwitches = []string{"debug", "systemd-cgroup", "help", "h", "version", "v", "V", "usage", "?"}
	createSwitches = []string{
		"detach", "d", "keep", "no-subreaper", "no-pivot", "no-new-keyring", "help", "h", "usage", "?",
		"tcp-established", "ext-unix-sk", "shell-job", "file-locks", "auto-dedup", "lazy-pages",
	}
	execSwitches = []string{"tty", "t", "detach", "d", "no-new-privs", "ignore-paused", "help", "h", "usage", "?"}

	likeRunc = &grammar{
		global: options{[]string{"root", "log", "log-format", "criu", "rootless"}, globalSwitches},
		create: options{[]string{
			"bundle", "b", "console-socket", "pidfd-socket", "pid-file", "preserve-fds",
			"image-path", "work-path", "manage-cgroups-mode", "empty-ns", "lsm-profile", "lsm-mount-context",
		}, createSwitches},
		exec: options{[]string{
			"console-socket", "pidfd-socket", "cwd", "env", "e", "user", "u", "additional-gids", "g", "process", "p", "pid-file",
			"process-label", "apparmor", "cap", "c", "preserve-fds", "cgroup",
		}, execSwitches},
		read:     flags,
		reorders: true,
	}
	likeCrun = &grammar{
		global: options{[]string{"root", "log", "log-format", "log-level", "rootless", "cgroup-manager"}, globalSwitches},
		create: options{[]string{
			"bundle", "b", "config", "f", "console-socket", "pid-file", "preserve-fds",
			"image-path", "work-path", "manage-cgroups-mode", "network-lock", "lsm-profile", "lsm-mount-context",
		}, createSwitches},
		exec: options{[]string{
			"console-socket", "cwd", "env", "e", "user", "u", "process", "p", "pid-file", "process-label", "apparmor", "cap", "c",
			"preserve-fds", "cgroup",
		}, execSwitches},
		read: argp,
	}
)

// parse reads args as the runtimes of a grammar do. It finds the command at the first argument that is no global option, so that a
// container called "create" is not taken for a command.
func parse(args []string, g *grammar) call {
	c := call{args: args, grammar: g}
	rest := g.read(args, g.global, func(name, value string, _ int) {
		switch name {
		case "root":
			c.root = value
		case "log":
			c.log = value
		case "log-format":
			c.logFormat = value
		}
	})
	if len(rest) == 0 {
		return c
	}
	c.command = rest[0]
	switch c.command {
	case "create", "run", "restore":
	default:
		c.rest = rest[1:]
		return c
	}
	c.container(rest[1:])
	return c
}

// container reads what follows create, run or restore.
func (c *call) container(args []string) {
	if c.grammar.reorders {
		args = reorder(args, c.grammar.create)
	}
	c.tail = args
	config := "config.json"
	ids := c.grammar.read(args, c.grammar.create, func(name, value string, at int) {
		switch name {
		case "bundle", "b":
			c.bundle = value
			c.values = append(c.values, placed{"--bundle", value, at})
		case "config", "f":
			config = value
			c.values = append(c.values, placed{"--config", value, at})
		case "console-socket", "pidfd-socket":
			c.values = append(c.values, placed{"--" + name, value, at})
		}
		if !c.grammar.create.known(name) {
			c.strange = name
		}
	})
	c.bundle = absolute(c.bundle)
	if c.config = filepath.Join(c.bundle, "config.json"); config != "config.json" {
		c.config = absolute(config)
	}
	if len(ids) == 1 {
		c.id = ids[0]
	}
}

// placed is the value of an option in tail: the argument that it is, or ends.
type placed struct {
	option, value string
	at            int
}

// redirect has the low-level runtime read made's config.json: crun takes a file's name, and runc only a folder.
func (c *call) redirect(crun bool) {
	option, to := "--bundle", c.made
	if crun {
		option, to = "--config", filepath.Join(c.made, "config.json")
	}
	tail := slices.Clone(c.tail)
	named := false
	put := func(v placed, to string) { tail[v.at] = strings.TrimSuffix(tail[v.at], v.value) + to }
	for _, v := range c.values {
		switch {
		case v.option == option:
			put(v, to)
			named = true
		case !crun && strings.HasSuffix(v.option, "-socket") && v.value != "" && !strings.ContainsAny(v.value[:1], "/@"):
			put(v, filepath.Join(c.bundle, v.value)) // runc connects when it is in the bundle's folder already
		}
	}
	if !named {
		tail = append([]string{option, to}, tail...)
	}
	c.args = append(slices.Clone(c.args[:len(c.args)-len(c.tail)]), tail...)
}

// absolute is the folder or file that the runtime finds at a path: ".." is the kernel's there, behind links.
func absolute(path string) string {
	if strings.Contains(path, "..") {
		if real, err := resolved(path); err == nil {
			return real
		}
	}
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// resolved is the path of a file behind links. (filepath.EvalSymlinks would make the program a page longer.)
func resolved(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	return os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
}

// same says whether two grammars read the same.
func (c call) same(d call) bool {
	return c.command == d.command && c.bundle == d.bundle && c.config == d.config && c.id == d.id && c.root == d.root &&
		c.log == d.log && c.logFormat == d.logFormat && c.strange == d.strange
}

// flags reads options as Go's package flag does: -name, --name, --name value and --name=value.
func flags(args []string, o options, found func(name, value string, at int)) (rest []string) {
	for i := 0; i < len(args); i++ {
		name, ok := strings.CutPrefix(args[i], "-")
		if !ok || name == "" {
			return args[i:]
		}
		name = strings.TrimPrefix(name, "-")
		if name == "" { // "--" ends the options
			return args[i+1:]
		}
		name, value, assigned := strings.Cut(name, "=")
		if slices.Contains(o.values, name) && !assigned && i+1 < len(args) {
			i++
			value = args[i]
		}
		found(name, value, i)
	}
	return nil
}

// reorder puts the options that a command knows before its arguments, as urfave/cli 1.22 does for runc (reorderArgs). What follows one
// without "=" goes with it, also behind a switch, where it then ends the options.
func reorder(args []string, o options) []string {
	isOption := func(arg string) bool {
		name, ok := strings.CutPrefix(arg, "-")
		name, _, _ = strings.Cut(strings.TrimPrefix(name, "-"), "=")
		return ok && o.known(name)
	}
	var first, rest []string
	expected := false
	for i, arg := range args {
		switch {
		case expected && !isOption(arg):
			first, expected = append(first, arg), false
		case arg == "--":
			return slices.Concat(first, []string{arg}, rest, args[i+1:])
		case isOption(arg):
			first, expected = append(first, arg), !strings.Contains(arg, "=")
		default:
			rest = append(rest, arg)
		}
	}
	return append(first, rest...)
}

// argp reads options as glibc's argp does for crun, in order: --name value, --name=value and beginnings of names that only one has;
// -n value, -nvalue, and several letters behind one dash.
func argp(args []string, o options, found func(name, value string, at int)) (rest []string) {
	for i := 0; i < len(args); i++ {
		name, ok := strings.CutPrefix(args[i], "-")
		switch {
		case !ok || name == "":
			return args[i:]
		case name == "-":
			return args[i+1:]
		}
		next := func() (value string) {
			if i+1 < len(args) {
				i++
				value = args[i]
			}
			return value
		}
		if long, ok := strings.CutPrefix(name, "-"); ok {
			name, value, assigned := strings.Cut(long, "=")
			name = o.whole(name)
			if slices.Contains(o.values, name) && !assigned {
				value = next()
			}
			found(name, value, i)
			continue
		}
		for j := range name {
			letter, value := name[j:j+1], name[j+1:]
			if !slices.Contains(o.values, letter) {
				found(letter, "", i)
				continue
			}
			if value == "" {
				value = next()
			}
			found(letter, value, i)
			break
		}
	}
	return nil
}

// whole is the option of which name is the beginning, if there is just one.
func (o options) whole(name string) string {
	found := ""
	for _, known := range slices.Concat(o.values, o.switches) {
		switch {
		case known == name:
			return name
		case len(known) > 1 && strings.HasPrefix(known, name) && found != "":
			return name
		case len(known) > 1 && strings.HasPrefix(known, name):
			found = known
		}
	}
	if found == "" {
		return name
	}
	return found
}
