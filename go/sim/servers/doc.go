// Package servers runs the real servers, of package lighthouse and package manager, under the simulation's schedules of
// faults, on in-memory connections and the clock of testing/synctest. The ranks are the simulation's model, and its rules
// are checked on what members and ranks receive. The package contains tests only.
package servers
