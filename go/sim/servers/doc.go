// Package servers runs the real servers, of package lighthouse and package manager, under the simulation's schedules of faults, on
// in-memory connections and the clock of testing/synctest. The ranks are the simulation's model. A sim.Judge checks the
// simulation's rules by the messages that members and ranks receive. The package contains tests only.
package servers
