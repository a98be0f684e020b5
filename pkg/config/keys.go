// SPDX-License-Identifier: Apache-2.0

package config

import "reflect"

// Keys are all keys of cgpu.toml, as docs/variables.md writes them: those of a table with the table before them.
func Keys() []string {
	var all []string
	for field := range reflect.TypeOf(file{}).Fields() {
		if key := field.Tag.Get("toml"); key != "sim" {
			all = append(all, key)
		}
	}
	for field := range reflect.TypeOf(file{}.Sim).Fields() {
		if key := field.Tag.Get("toml"); key != "gpus" {
			all = append(all, "[sim] "+key)
		}
	}
	for field := range reflect.TypeOf(fileGPU{}).Fields() {
		all = append(all, "[[sim.gpus]] "+field.Tag.Get("toml"))
	}
	for field := range reflect.TypeOf(fileDomain{}).Fields() {
		all = append(all, "[[domains]] "+field.Tag.Get("toml"))
	}
	return all
}
