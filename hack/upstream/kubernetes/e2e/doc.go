// Package e2e is upstream's e2e suite with the tests of networking alone: the whole takes several times as long to build.
package e2e
