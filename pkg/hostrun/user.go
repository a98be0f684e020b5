// SPDX-License-Identifier: Apache-2.0

package hostrun

import (
	"errors"
	"fmt"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
)

// User is whom the command runs as.
type User struct {
	UID, GID int
	Groups   []int
	// Name, Home and Shell are empty where no data base knows the user.
	Name, Home, Shell string
	// Keep: the caller himself, whose groups and environment stay as they are.
	Keep bool
}

// Caller is what is known of who has started cgpu run.
type Caller struct {
	UID int
	// SudoUID and SudoGID are the variables that sudo sets; empty without it.
	SudoUID, SudoGID string
}

// ThroughSudo says that another user than root has come through sudo, who may have been allowed cgpu run and nothing else.
func (c Caller) ThroughSudo() bool { return c.SudoUID != "" && c.SudoUID != "0" }

// Whom decides as whom the command runs: flag is --user, or empty. Without it that is whoever has called sudo, else the
// caller. A user who came through sudo cannot be another one: sudo has let him start cgpu run, perhaps with any arguments.
func Whom(flag string, c Caller, lookup func(name string) (User, error)) (User, error) {
	if c.ThroughSudo() {
		uid, err1 := strconv.Atoi(c.SudoUID)
		gid, err2 := strconv.Atoi(c.SudoGID)
		if err1 != nil || err2 != nil || uid <= 0 || gid < 0 {
			return User{}, fmt.Errorf("SUDO_UID=%q, SUDO_GID=%q: want the numbers that sudo sets", c.SudoUID, c.SudoGID)
		}
		u, err := lookup(c.SudoUID)
		if err != nil {
			u = User{UID: uid, GID: gid, Groups: []int{gid}}
		}
		if flag == "" || flag == c.SudoUID || flag == u.Name && u.Name != "" {
			return u, nil
		}
		return User{}, fmt.Errorf("--user %q: sudo was called by user %s, and the command can run as nobody else: leave it out, or "+
			"start cgpu run from a root shell without SUDO_UID", flag, c.SudoUID)
	}
	if flag == "" {
		return User{UID: c.UID, Keep: true}, nil
	}
	name, group, grouped := strings.Cut(flag, ":")
	u, err := lookup(name)
	if !grouped {
		if err != nil {
			return User{}, fmt.Errorf("--user %q: %w; want a user's name, or UID:GID", flag, err)
		}
		return u, nil
	}
	gid, gidErr := strconv.ParseUint(group, 10, 31)
	if gidErr != nil {
		return User{}, fmt.Errorf("--user %q: want a user's name, or UID:GID", flag)
	}
	if err != nil {
		uid, uidErr := strconv.ParseUint(name, 10, 31)
		if uidErr != nil {
			return User{}, fmt.Errorf("--user %q: %w; want a user's name, or UID:GID", flag, err)
		}
		u = User{UID: int(uid)}
	}
	u.GID, u.Groups = int(gid), []int{int(gid)}
	return u, nil
}

// Lookup finds a user by name or number. A static program reads /etc/passwd and /etc/group by itself; getent and id know the
// directory service of a cluster too.
func Lookup(name string) (User, error) {
	if name == "" || strings.HasPrefix(name, "-") {
		return User{}, errors.New("no such user")
	}
	if out, err := exec.Command("getent", "passwd", name).Output(); err == nil {
		line, _, _ := strings.Cut(string(out), "\n")
		u, err := parsePasswd(line)
		if err != nil {
			return u, err
		}
		groups, err := exec.Command("id", "-G", u.Name).Output()
		if err != nil {
			return u, fmt.Errorf("id -G %s: %w", u.Name, err)
		}
		u.Groups, err = parseGroups(string(groups))
		return u, err
	}
	known, err := user.Lookup(name)
	if err != nil {
		if known, err = user.LookupId(name); err != nil {
			return User{}, errors.New("no such user")
		}
	}
	u := User{Name: known.Username, Home: known.HomeDir}
	ids, err := known.GroupIds()
	if err == nil {
		u.Groups, err = parseGroups(strings.Join(ids, " "))
	}
	if err == nil {
		u.UID, err = strconv.Atoi(known.Uid)
	}
	if err == nil {
		u.GID, err = strconv.Atoi(known.Gid)
	}
	return u, err
}

// parsePasswd reads a line of passwd(5).
func parsePasswd(line string) (User, error) {
	f := strings.Split(line, ":")
	if len(f) != 7 {
		return User{}, fmt.Errorf("getent passwd says %q, which is no line of passwd", line)
	}
	uid, err1 := strconv.Atoi(f[2])
	gid, err2 := strconv.Atoi(f[3])
	return User{UID: uid, GID: gid, Name: f[0], Home: f[5], Shell: f[6]}, errors.Join(err1, err2)
}

func parseGroups(text string) ([]int, error) {
	var groups []int
	for _, f := range strings.Fields(text) {
		gid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("group %q: want a number", f)
		}
		groups = append(groups, gid)
	}
	return groups, nil
}
