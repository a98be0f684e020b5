// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/opencgpu/cgpu/pkg/page"
)

// maxLog bounds a file of the log. The daemon and its server write some lines for each connection, of which a member can make any number. A
// domain's daemon has 1 MiB for its folder.
const maxLog = 256 << 10

// logFile is what the daemon and its server say: the last of it, in one file and its predecessor.
type logFile struct {
	path string
	most int64
	mu   sync.Mutex
	f    *os.File
	size int64
	also *os.File // until the gate is there: whoever starts it may be waiting for why not
}

func newLog(path string, most int64, also *os.File) (*logFile, error) {
	l := &logFile{path: path, most: most, also: also}
	return l, l.begin()
}

// begin begins a file; what is in the one before stays.
func (l *logFile) begin() (err error) {
	if l.f != nil {
		err = errors.Join(l.f.Close(), os.Rename(l.path, l.path+".1"))
	}
	if l.f, l.size = nil, 0; err == nil {
		l.f, err = create(l.path)
	}
	return err
}

// create begins a file in the daemon's folder. Whoever has taken NVIDIA's server over is the same user, and may have put something else in
// its place: a pipe, for whose reader this process would wait, and not end.
func create(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("%s is not a file", path), err, f.Close())
	}
	return f, nil
}

// Leave writes why the server ends into the daemon's folder, for the event of its guard's, who knows no more than that it ended.
func Leave(own string, why error) {
	if f, err := create(filepath.Join(own, page.Ended)); err == nil {
		_, _ = f.WriteString(why.Error())
		_ = f.Close()
	}
}

// Write never fails: the daemon must not end for a full disk.
func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.also != nil {
		_, _ = l.also.Write(p)
	}
	if l.size+int64(len(p)) > l.most && l.begin() != nil || l.f == nil {
		return len(p), nil
	}
	n, err := l.f.Write(p)
	if l.size += int64(n); err != nil {
		_ = l.begin()
	}
	return len(p), nil
}

// apart ends what is also written elsewhere.
func (l *logFile) apart() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.also = nil
}
