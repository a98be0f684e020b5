// SPDX-License-Identifier: Apache-2.0

package device

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"
)

// sources are the files of the running kernel that a key is read from; tests have their own.
type sources struct {
	bootID     string
	driverFile string
	driverGPUs string
}

var kernel = sources{
	bootID:     "/proc/sys/kernel/random/boot_id",
	driverFile: "/proc/driver/nvidia/version",
	driverGPUs: "/proc/driver/nvidia/gpus",
}

// ReadKey describes the node's present state. library is libcuda of the NVIDIA driver, or empty; helper is the program
// that makes the table.
//
// Read the key before what it describes: a change in between then makes the table stale instead of silently wrong.
func ReadKey(driver, configFile, helper, library string) (Key, error) {
	return kernel.readKey(driver, configFile, helper, library)
}

func (s sources) readKey(driver, configFile, helper, library string) (Key, error) {
	k := Key{ConfigFile: configFile, RefreshHelper: helper, Library: library}
	var err error
	// Without a boot id (some sandboxes) the run directory, which is a tmpfs, is what forgets the last boot.
	if k.BootID, err = readText(s.bootID); err != nil {
		return Key{}, err
	}
	if driver == DriverNVIDIA {
		k.DriverFile = s.driverFile
		if k.DriverText, err = readText(s.driverFile); err != nil {
			return Key{}, err
		}
		if k.DriverGPUs, err = readNames(s.driverGPUs); err != nil {
			return Key{}, err
		}
	}
	for _, f := range []struct {
		path string
		time *time.Time
		size *int64
	}{
		{library, &k.LibraryTime, &k.LibrarySize},
		{configFile, &k.ConfigTime, &k.ConfigSize},
		{helper, &k.HelperTime, &k.HelperSize},
	} {
		if *f.time, *f.size, err = stamp(f.path); err != nil {
			return Key{}, err
		}
	}
	return k, nil
}

// differs says what of the node's state now is not what k was made from; empty when nothing is.
func (k Key) differs(now Key) string {
	switch {
	case k.BootID != now.BootID:
		return "the node was booted since"
	case k.DriverText != now.DriverText:
		return fmt.Sprintf("%s differs", k.DriverFile)
	case !slices.Equal(k.DriverGPUs, now.DriverGPUs):
		return fmt.Sprintf("the driver had GPUs %v then and has %v now", k.DriverGPUs, now.DriverGPUs)
	case k.ConfigFile != now.ConfigFile:
		return fmt.Sprintf("it was made from %s, the configuration now is %s", k.ConfigFile, now.ConfigFile)
	case !k.ConfigTime.Equal(now.ConfigTime) || k.ConfigSize != now.ConfigSize:
		return k.ConfigFile + " was changed"
	case !k.LibraryTime.Equal(now.LibraryTime) || k.LibrarySize != now.LibrarySize:
		return k.Library + " was changed"
	case !k.HelperTime.Equal(now.HelperTime) || k.HelperSize != now.HelperSize:
		return k.RefreshHelper + " was changed"
	}
	return ""
}

// stamp returns a file's modification time and size; zeros when path is empty or nothing is there.
func stamp(path string) (time.Time, int64, error) {
	if path == "" {
		return time.Time{}, 0, nil
	}
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return time.Time{}, 0, nil
	case err != nil:
		return time.Time{}, 0, fmt.Errorf("device: %w", err)
	}
	return info.ModTime(), info.Size(), nil
}

// readText returns the start of a small kernel file without white space around it; empty when it is not there.
func readText(path string) (string, error) {
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("device: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return "", fmt.Errorf("device: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// readNames returns the sorted names in a folder; none when it is not there.
func readNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("device: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}
