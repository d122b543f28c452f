// Package servers runs the real servers, of package lighthouse and package manager, under the simulation's schedules of
// faults, on in-memory connections and the clock of testing/synctest. The ranks are those of the simulation. A sim.Judge checks the
// simulation's rules on the messages that members and ranks receive. The package contains tests only.
package servers
