// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"os"
	"sync"
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
		l.f, err = os.OpenFile(l.path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	}
	return err
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
