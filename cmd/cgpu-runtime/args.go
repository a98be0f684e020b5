package main

import (
	"path/filepath"
	"strings"
)

// call is what we need to know of the command line. The command line itself goes to the runtime as it came.
type call struct {
	command string // create, run, state, …; empty when there is none
	// bundle (absolute) and id are read for create, run and restore.
	bundle    string
	id        string
	log       string
	logFormat string
	// root is the folder of the runtime's state, empty where the engine leaves it to the runtime.
	root string
	// rest is what follows any other command: the container's id is in it, somewhere among options.
	rest []string
}

// Options of runc and crun that take the next argument as their value. Every other option is a switch.
var (
	globalValues = []string{"root", "log", "log-format", "criu", "rootless", "cgroup-manager", "log-level"}
	createValues = []string{
		"bundle", "b", "console-socket", "pidfd-socket", "pid-file", "preserve-fds", "config", "f",
		// restore
		"image-path", "work-path", "manage-cgroups-mode", "empty-ns", "lsm-profile", "lsm-mount-context", "network-lock",
	}
)

// parse finds the command at the first argument that is no global option, so that a container called "create" is not
// taken for a command.
func parse(args []string) call {
	var c call
	rest := options(args, globalValues, func(name, value string) {
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
	c.bundle = "."
	rest = options(rest[1:], createValues, func(name, value string) {
		if name == "bundle" || name == "b" {
			c.bundle = value
		}
	})
	if abs, err := filepath.Abs(c.bundle); err == nil {
		c.bundle = abs
	}
	if len(rest) > 0 {
		c.id = rest[0]
	}
	return c
}

// options walks over the options at the beginning of args and returns what follows. Options are spelled -name, --name,
// --name value and --name=value; values are those that have a value.
func options(args, values []string, found func(name, value string)) []string {
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
		for _, v := range values {
			if v != name {
				continue
			}
			if !assigned && i+1 < len(args) {
				i++
				value = args[i]
			}
			found(name, value)
		}
	}
	return nil
}
