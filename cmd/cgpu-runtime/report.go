// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"time"
)

// report tells the user why the container was refused. Engines show the last line of level "error" in the file of
// --log, if it has runc's form; text on stderr alone gives "unable to retrieve OCI runtime error".
func (c call) report(err error) {
	message := "cgpu: " + strings.TrimPrefix(err.Error(), "cgpu-runtime: ") // engines do not say whose words they pass on
	os.Stderr.WriteString(message + "\n")
	if c.log == "" {
		return
	}
	f, err := os.OpenFile(c.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return // nowhere to say so
	}
	defer f.Close()
	now := time.Now().UTC().Format(time.RFC3339)
	if c.logFormat == "json" {
		line, _ := json.Marshal(struct { // strings always have a JSON form
			Level string `json:"level"`
			Msg   string `json:"msg"`
			Time  string `json:"time"`
		}{"error", message, now})
		f.Write(append(line, '\n'))
		return
	}
	f.WriteString("time=" + strconv.Quote(now) + " level=error msg=" + strconv.Quote(message) + "\n")
}
