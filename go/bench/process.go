package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// used is the processor time and the memory that a process has used so far.
type used struct {
	cpu              time.Duration
	memoryMB, peakMB float64 // resident
}

// tick is the unit of times in /proc on every Linux that Go runs on.
const tick = 10 * time.Millisecond

// usage measures a process with all of its threads. It is zero if there is no such process, or no /proc.
func usage(pid int) (u used) {
	if pid == 0 {
		return u
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u
	}
	// The second field, the command's name in parentheses, may contain spaces and parentheses.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	for _, field := range fields[11:13] {
		n, _ := strconv.ParseInt(field, 10, 64)
		u.cpu += time.Duration(n) * tick
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		kb, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		switch name {
		case "VmRSS":
			u.memoryMB = kb / 1024
		case "VmHWM":
			u.peakMB = kb / 1024
		}
	}
	return u
}
