package main

import "github.com/opencgpu/cgpu/pkg/snapshot"

// States of a container, as this command's tables and filters name them.
const (
	stateStarting  = snapshot.StateStarting
	stateRunning   = snapshot.StateRunning
	stateNoAnswer  = snapshot.StateNoAnswer
	stateGuardDead = snapshot.StateGuardDead
	stateNoPage    = snapshot.StateNoPage
	statePaused    = snapshot.StatePaused
	stateGone      = snapshot.StateGone
)
