// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
	"github.com/opencgpu/cgpu/pkg/tally"
)

const (
	// leftoverAge is how old a socket or page without a record must be before it is removed. They are made after the
	// reservation, so there is no such thing as a socket of a record to come; the age is for the machine's clock.
	leftoverAge = 30 * time.Second
	// keptLogs is how many logs of containers that are gone stay on the node, the newest: with a guard's bound of 64 KiB that is
	// 4 MiB of /run, however often a pod is tried again.
	keptLogs = 64
	// keptBundles is the same for bundles. The poststop hook removes them; of those that are left, nobody knows which belong to a
	// container that has ended and is not deleted yet, and which to one that was killed while it was made.
	keptBundles = 64
)

// Swept counts the files that Sweep removed.
type Swept struct{ Sockets, Pages, Bundles, Logs int }

// Sweep removes the sockets and vGPU pages of containers that are gone, and all but the newest of their bundles and their guards' logs.
// Counters of guards that are gone become the node's (tally.Fold).
// A guard removes its own sockets and page; this is for those that were killed, and for the logs. Each guard calls it, when its
// container has run for a while and when it ends, so that what is left on the node is bounded without a daemon.
func (l *Ledger) Sweep() (done Swept, err error) {
	// Without a ledger nobody knows whose files these are: it was removed while containers run, or there never was one.
	if _, err := os.Stat(l.path(fileName)); errors.Is(err, fs.ErrNotExist) {
		return done, nil
	}
	sockets, err1 := l.files(socketsName, suffixed(".sock", ".ctl"))
	pages, err2 := l.files(pagesName, suffixed(""))
	bundles, err3 := l.files(bundlesName, suffixed(""))
	logs, err4 := l.files(logsName, logNonce)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return done, err
	}
	// After the files: whoever makes one has a record before. So no lock is taken.
	records, err := l.List()
	if err != nil {
		return done, err
	}
	before := time.Now().Add(-leftoverAge)
	file := func(f runFile) error { return os.Remove(f.path) }
	folder := func(f runFile) error { return page.Remove(l.dir, f.nonce) }
	bundle := func(f runFile) error { return page.RemoveBundle(l.dir, f.nonce) }
	done.Sockets, err1 = remove(olderThan(before, ofNobody(sockets, records)), file)
	done.Pages, err2 = remove(olderThan(before, ofNobody(pages, records)), folder)
	done.Bundles, err3 = remove(allButNewest(keptBundles, olderThan(before, ofNobody(bundles, records))), bundle)
	done.Logs, err4 = remove(allButNewest(keptLogs, ofNobody(logs, records)), file)
	return done, errors.Join(err1, err2, err3, err4, tally.Fold(l.dir))
}

// runFile is a file of one reservation, whose nonce is in its name.
type runFile struct {
	path, nonce string
	changed     time.Time
}

// files lists those in a folder that nonceOf knows.
func (l *Ledger) files(folder string, nonceOf func(name string) string) ([]runFile, error) {
	entries, err := os.ReadDir(l.path(folder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("ledger: leftovers: %w", err)
	}
	var list []runFile
	for _, e := range entries {
		nonce := nonceOf(e.Name())
		if info, err := e.Info(); err == nil && IsNonce(nonce) {
			list = append(list, runFile{filepath.Join(l.path(folder), e.Name()), nonce, info.ModTime()})
		}
	}
	return list, nil
}

// suffixed knows names that are a nonce and one of the suffixes.
func suffixed(suffixes ...string) func(string) string {
	return func(name string) string {
		nonce, suffix := name[:min(len(name), nonceLength)], name[min(len(name), nonceLength):]
		if !slices.Contains(suffixes, suffix) {
			return ""
		}
		return nonce
	}
}

// logNonce knows the names that package launch gives to logs: the beginning of an ID, "-", a nonce and ".log".
func logNonce(name string) string {
	base, isLog := strings.CutSuffix(name, ".log")
	if dash := strings.LastIndexByte(base, '-'); isLog && dash >= 0 {
		return base[dash+1:]
	}
	return ""
}

// ofNobody leaves the files that belong to no record.
func ofNobody(files []runFile, records []Record) []runFile {
	used := make(map[string]bool, len(records))
	for _, r := range records {
		used[r.Nonce] = true
	}
	return slices.DeleteFunc(files, func(f runFile) bool { return used[f.nonce] })
}

func olderThan(before time.Time, files []runFile) []runFile {
	return slices.DeleteFunc(files, func(f runFile) bool { return f.changed.After(before) })
}

func allButNewest(n int, files []runFile) []runFile {
	slices.SortFunc(files, func(a, b runFile) int { return cmp.Or(b.changed.Compare(a.changed), cmp.Compare(a.path, b.path)) })
	return files[min(n, len(files)):]
}

// remove returns how many files it removed. Another may sweep at the same time. A tmpfs is busy to a guard, which may not unmount
// it: cgpu gc does. One that cannot be removed does not keep the others.
func remove(files []runFile, one func(runFile) error) (n int, first error) {
	for _, f := range files {
		switch err := one(f); {
		case err == nil:
			n++
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EBUSY) && first == nil:
			first = fmt.Errorf("ledger: leftovers: %w", err)
		}
	}
	return n, first
}

const nonceLength = 16

// IsNonce reports 16 hexadecimal digits, which a Record.Nonce is.
func IsNonce(s string) bool {
	return len(s) == nonceLength && strings.Trim(s, "0123456789abcdef") == ""
}
